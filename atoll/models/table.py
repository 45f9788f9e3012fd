"""The models that a job can name, and how each is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from atoll.errors import ConfigError, unknown
from atoll.models.gpt import GPT, GPTConfig


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRow:
    """One model that a job can name.

    Attributes:
        config: The frozen dataclass of its options.
        build: Makes the model from one of these.
    """

    config: type[GPTConfig]
    build: Callable[[Any], nn.Module]


MODELS: Mapping[str, ModelRow] = MappingProxyType({"gpt": ModelRow(GPTConfig, GPT)})
"""Name in a job file -> how it is built."""


def build_model(name: str, **options: object) -> nn.Module:
    """Return a freshly initialised model; the caller seeds torch beforehand.

    Raises:
        ConfigError: no such model, no such option, or a value of the wrong kind; the nearest known
            name is given.
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    row = MODELS[name]
    fields = {field.name: field for field in dataclasses.fields(row.config)}
    for option, value in options.items():
        if option not in fields:
            raise unknown(f"option of model {name!r}", option, fields)
        _check_kind(name, option, value, fields[option].default)
    return row.build(row.config(**options))  # type: ignore[arg-type]


def _check_kind(name: str, option: str, value: object, default: object) -> None:
    """Refuse a value whose kind differs from the default's; an int may stand for a float."""
    kinds: tuple[type, ...] = (float, int) if isinstance(default, float) else (type(default),)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(
            f"option {option!r} of model {name!r} has the wrong kind",
            given=f"{value!r} ({type(value).__name__})",
            expected=f"{kinds[0].__name__}, e.g. {default!r}",
        )
