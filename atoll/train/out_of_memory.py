"""Report every form of memory exhaustion as one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from atoll.errors import OutOfMemory

_SIGNS = ("not enough memory", "can't allocate memory", "out of memory")


@contextmanager
def memory_errors(*, member: str) -> Iterator[None]:
    """Turn every out-of-memory failure of torch and Python into :class:`OutOfMemory`.

    torch's CPU allocator raises a plain RuntimeError, recognized by its text.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _out_of_memory(member, error) from error
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in _SIGNS):
            raise _out_of_memory(member, error) from error
        raise


def _out_of_memory(member: str, error: BaseException) -> OutOfMemory:
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return OutOfMemory(
        "this machine has too little memory for its share of the training",
        given=f"member {member}: {text}",
        remedy="make batch in [train] or the model smaller, or use a machine with more memory",
    )
