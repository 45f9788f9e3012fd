"""Errors for operators and number types that a device lacks, with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.errors import ConfigError

_NO_OPERATOR = "not currently implemented for the"
_NO_TYPE = "framework doesn't support"
"""Parts of torch's messages: of every backend without an operator, and of MPS without a type."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn torch's messages about what a device lacks into :class:`ConfigError`.

    Raises:
        ConfigError: the device lacks an operator or a type of numbers that the body needs.
    """
    try:
        yield
    except (NotImplementedError, TypeError) as error:  # how torch says that it lacks one
        text = " ".join(str(error).split())
        if _NO_OPERATOR in text:
            raise ConfigError(
                "this accelerator lacks an operator of torch", given=text[:160],
                remedy='device = "cpu" in [job]; on Apple\'s env = '
                '["PYTORCH_ENABLE_MPS_FALLBACK=1"] in [launch] computes it on the processor',
            ) from error  # fmt: skip
        if _NO_TYPE in text:
            raise ConfigError(
                "this accelerator lacks a type of numbers", given=text[:160],
                remedy='fp32 in the model and its data, or device = "cpu" in [job]',
            ) from error  # fmt: skip
        raise
