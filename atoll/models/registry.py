"""The table of models that a job can name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from atoll.errors import ConfigError, unknown
from atoll.models.build_causal_lm import build_causal_lm
from atoll.models.gpt import GPT, GPTConfig
from atoll.models.gpt2 import GPT2, GPT2Config
from atoll.models.llama import Llama, LlamaConfig
from atoll.models.pretrained import CausalLMConfig
from atoll.models.resnet import ResNet, ResNetConfig
from atoll.models.vit import ViT, ViTConfig

TEXT, IMAGES = "text", "images"
"""Kinds of training data: tokens and next tokens, or images and classes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRow:
    """One model of the table; `build` makes a `Trainable` from an instance of `config`.

    `data` is `text` or `images`.
    """

    config: type[Any]
    build: Callable[[Any], nn.Module]
    data: str

    @property
    def options(self) -> Mapping[str, object]:
        """Every option and its default."""
        config = self.config()
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


MODELS: Mapping[str, ModelRow] = MappingProxyType(
    {
        "gpt": ModelRow(GPTConfig, GPT, TEXT),
        "gpt2": ModelRow(GPT2Config, GPT2, TEXT),
        "llama": ModelRow(LlamaConfig, Llama, TEXT),
        "resnet": ModelRow(ResNetConfig, ResNet, IMAGES),
        "transformers": ModelRow(CausalLMConfig, build_causal_lm, TEXT),
        "vit": ModelRow(ViTConfig, ViT, IMAGES),
    }
)


def model_row(name: str) -> ModelRow:
    """Return a model's row; raises ConfigError with the nearest name if it is unknown."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def build_model(name: str, **options: object) -> nn.Module:
    """Return a newly initialized model (seed torch before); raises ConfigError."""
    row = model_row(name)
    defaults = row.options
    for option, value in options.items():
        if option not in defaults:
            raise unknown(f"option of model {name!r}", option, defaults)
        _check_kind(name, option, value, defaults[option])
    return row.build(row.config(**options))


def _check_kind(name: str, option: str, value: object, default: object) -> None:
    """Check that a value has the type of the default; an int may replace a float."""
    kinds: tuple[type, ...] = (float, int) if isinstance(default, float) else (type(default),)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(
            f"option {option!r} of model {name!r} has the wrong kind",
            given=f"{value!r} ({type(value).__name__})",
            expected=f"{kinds[0].__name__}, e.g. {default!r}",
        )
