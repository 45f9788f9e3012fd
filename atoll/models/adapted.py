"""A model of `transformers` that is fine-tuned: with adapters of `peft`, or as a whole.

Adapters are put into the library's own modules, so names stay the library's: beside the frozen
`model.layers.0.self_attn.q_proj.base_layer.weight` there are `....q_proj.lora_A.default.weight` and
so on. LoRA: https://arxiv.org/abs/2106.09685; DoRA: https://arxiv.org/abs/2402.09353.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from atoll.errors import ConfigError
from atoll.models.causal_lm import CausalLM
from atoll.models.pretrained import CausalLMConfig

FULL, DORA = "full", "dora"
DPO, KTO = "dpo", "kto"
"""Objectives: prefer one answer to another; prefer good answers to bad ones."""
NAME = "default"
"""The library's name for the only adapter."""
IGNORED = -100
"""Target that is not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """How a model is fine-tuned; the keys of `[tune]` of the same names."""

    method: str = "lora"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    objective: str = "answers"
    beta: float = 0.1
    desirable: float = 1.0
    undesirable: float = 1.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Adapter:
        """Read what `CausalLMConfig.adapter` holds."""
        return cls(**{**given, "targets": tuple(given.get("targets", ()))})

    def config(self) -> Any:
        """Return the configuration of `peft`; raises ConfigError without the library."""
        return peft().LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout,
            target_modules=list(self.targets) or "all-linear", use_dora=self.method == DORA,
            task_type="CAUSAL_LM",
        )  # fmt: skip


def peft() -> Any:
    """Return the `peft` module; ConfigError if it is not installed."""
    try:
        import peft as module
    except ImportError as error:
        raise ConfigError(
            "adapters need a library that is not installed", given=str(error),
            expected="peft 0.17 or later", remedy="pip install 'atoll[tune]'",
        ) from error  # fmt: skip
    return module


def with_adapters(config: CausalLMConfig, theirs: Any) -> Any:
    """Put adapters into a model of the library, in place; all other parameters are frozen.

    The adapters' start is drawn from torch's random state: seed it before.

    Raises:
        ConfigError: no layer has one of the wanted names, or the library is missing.
    """
    adapter = Adapter.of(config.adapter)
    if adapter.method == FULL:
        return theirs
    module = peft()
    try:
        changed = module.inject_adapter_in_model(adapter.config(), theirs, adapter_name=NAME)
    except ValueError as error:
        raise ConfigError(
            "adapters cannot be put into this model",
            given=f"targets = {list(adapter.targets)}: {' '.join(str(error).split())[:200]}",
            expected="names of linear layers, e.g. q_proj, v_proj; empty: all",
        ) from error
    return changed


class TunedLM(CausalLM):
    """A model of the library that takes packed rows of examples, with a mask of its targets."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(batch, length, vocab)``.

        `ids` are int64 ``(batch, length)``, or ``(batch, 2, length)``: ids and positions. Where
        positions begin at 0 again another example begins, which does not see those before it.
        """
        if ids.dim() == 2:
            return super().forward(ids)
        self.check_length(ids.shape[2])
        found = self._theirs[0](input_ids=ids[:, 0], position_ids=ids[:, 1], use_cache=False)
        return cast(Tensor, found.logits)

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per trained token; targets of -100 are ignored."""
        flat = outputs.flatten(0, 1).float()
        return functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED)

    def tensor_plan(self) -> Mapping[str, str]:
        """Return an empty plan: adapters are not split over ranks."""
        return {}

    def portable_options(self) -> dict[str, Any]:
        """Return options that rebuild the model, from its source if only adapters were trained."""
        config, adapter = self.config, dict(self.config.adapter)
        if adapter.get("method") == FULL:
            return super().portable_options()
        named = {"source": config.source, "gguf": config.gguf, "config": dict(config.config)}
        return {
            **{name: value for name, value in named.items() if value},
            "context": config.context, "vocab_size": config.vocab_size, "adapter": adapter,
        }  # fmt: skip

    @torch.no_grad()
    def load_adapters(self, state: Mapping[str, Tensor]) -> None:
        """Load what was trained: adapters, or all weights.

        Raises:
            RuntimeError: a trained tensor is missing, or one is unknown, or has another shape.
        """
        missing, unknown = self.load_state_dict(state, strict=False)
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        wrong = [*(name for name in missing if name in trained), *unknown]
        if wrong:
            raise RuntimeError(f"missing or unknown: {', '.join(wrong[:8])}")
