"""Builds a causal language model of the `transformers` library as the class that its use needs."""

from __future__ import annotations

from typing import Any

from atoll.errors import ConfigError
from atoll.models.adapted import DPO, KTO, TunedLM, with_adapters
from atoll.models.causal_lm import GPT2, ROTARY, CausalLM, LayeredCausalLM, LayeredGPT2
from atoll.models.language import LanguageModel
from atoll.models.preferring import JudgedLM, PreferringLM
from atoll.models.pretrained import CausalLMConfig, make_pretrained


def build_causal_lm(config: CausalLMConfig, *, weights: bool = True) -> LanguageModel:
    """Return a model of the library, pretrained or random; without `weights` none are loaded.

    Raises:
        ConfigError: no model is named, it does not fit context or vocabulary, or no library.
        DataError: the model is missing or unreadable.
    """
    theirs = make_pretrained(config, weights=weights)
    _check(config, theirs.config)
    if config.adapter:
        kinds = {DPO: PreferringLM, KTO: JudgedLM}
        kind = kinds.get(str(config.adapter.get("objective")), TunedLM)
        return kind(config, with_adapters(config, theirs))
    if theirs.config.model_type == GPT2 and not theirs.config.add_cross_attention:
        return LayeredGPT2(config, theirs)
    if _has_units(config, theirs.config):
        return LayeredCausalLM(config, theirs)
    return CausalLM(config, theirs)


def _has_units(config: CausalLMConfig, theirs: Any) -> bool:
    """Return whether chaining the layers computes the model's forward pass."""
    if theirs.model_type not in ROTARY:
        return False
    window = getattr(theirs, "sliding_window", None)
    return window is None or config.context <= window


def _check(config: CausalLMConfig, theirs: Any) -> None:
    """Raise ConfigError for sequences and tokens that the model does not support."""
    longest = getattr(theirs, "max_position_embeddings", None)
    if longest is not None and config.context > longest:
        raise ConfigError(
            "the model cannot read sequences of this length",
            given=f"context = {config.context}",
            expected=f"at most {longest}",
        )
    if config.vocab_size > theirs.vocab_size:
        raise ConfigError(
            "the tokenizer has more tokens than the model",
            given=f"{config.vocab_size} tokens, a model of {theirs.vocab_size}",
            expected='tokenizer = "model" in [data], or one of at most that size',
        )
