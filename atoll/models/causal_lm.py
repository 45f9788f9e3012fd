"""Any causal language model of the `transformers` library, as a `Trainable`.

Weight names are the library's, so it can load the `model.safetensors` of a run. GPT-2 and the
families in `ROTARY` are made of units, which pipelines, recomputation and sharding need.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.models.language import LanguageModel, LayeredLanguageModel, check_writing, evaluating
from atoll.models.pretrained import CausalLMConfig, library

ROTARY = frozenset(
    {
        "arcee", "gemma", "glm", "glm4", "llama", "mistral", "nemotron", "olmo", "olmo2", "phi3",
        "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2",
    }
)  # fmt: skip
"""Model types with layers that need only the rotary tables besides hidden states."""

GPT2 = "gpt2"
"""The model type whose positions are added to the embedding of the tokens."""

_WORDS = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gather",
    "rowwise_split_input": "slice",
    "replicated_with_grad_allreduce": "inside",
}
"""Tensor-parallel style of the library -> that of Atoll."""


class CausalLM(LanguageModel):
    """A library model that is called as a whole, so pipelines cannot split it."""

    config: CausalLMConfig

    def __init__(self, config: CausalLMConfig, theirs: Any) -> None:
        super().__init__()
        self.config = config
        for name, child in theirs.named_children():
            self.add_module(name, child)
        # In a tuple, so that it is not registered as a submodule, which would duplicate weight
        # names.
        self._theirs = (theirs,)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(batch, length, vocab)`` for int64 token ids ``(batch, length)``."""
        self.check_length(ids.shape[1])
        return cast(Tensor, self._theirs[0](input_ids=ids, use_cache=False).logits)

    @property
    def library_model(self) -> Any:
        """The library's model, with adapters in it if there are any."""
        return self._theirs[0]

    def tensor_plan(self) -> Mapping[str, str]:
        """Return the library's tensor-parallel plan; raises ConfigError for unknown words."""
        theirs = self._theirs[0]
        known: Mapping[str, str] = getattr(theirs.config, "base_model_tp_plan", None) or {}
        prefix = f"{theirs.base_model_prefix}."
        foreign = [f"{name}: {word}" for name, word in known.items() if word not in _WORDS]
        if foreign:
            raise ConfigError(
                "a part of this model cannot be split over tensor ranks",
                given=f"{theirs.config.model_type}, {foreign[0]}",
                expected="a plan of the words " + ", ".join(_WORDS),
                remedy='inner = "fsdp", or a plan of your own in [island]',
            )
        plan = {prefix + name: _WORDS[word] for name, word in known.items()}
        if plan:
            whole = {id(module): name for name, module in self.named_modules()}
            plan[whole[id(theirs.get_input_embeddings())]] = "vocabulary"
            plan[whole[id(theirs.get_output_embeddings())]] = "vocabulary"
        return plan

    def portable_options(self) -> dict[str, Any]:
        """Return options that rebuild the model without its source, stored with the weights."""
        settings = json.loads(self._theirs[0].config.to_json_string(use_diff=False))
        described = {key: value for key, value in settings.items() if not key.startswith("_")}
        context, vocab_size = self.config.context, self.config.vocab_size
        return {"config": described, "context": context, "vocab_size": vocab_size}

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Tensor,
        *,
        tokens: int,
        temperature: float = 0.8,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """As :meth:`LanguageModel.generate`, with cached keys and values of the whole text."""
        check_writing(prompt_ids, tokens=tokens, temperature=temperature, top_k=top_k)
        if not tokens:
            return prompt_ids
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        settings = library().GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, use_cache=True, **sampling
        )
        with evaluating(self), _drawing_from(generator):
            written = self._theirs[0].generate(
                prompt_ids, generation_config=settings, attention_mask=torch.ones_like(prompt_ids)
            )
        return cast(Tensor, written)


@contextmanager
def _drawing_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let the library, which takes no generator, draw its random numbers from one."""
    if generator is None:
        yield
        return
    seed = torch.randint(1 << 62, (), generator=generator, device=generator.device)
    module = torch.get_device_module()  # of the accelerator, or of the processor
    devices = range(module.device_count()) if hasattr(module, "get_rng_state") else ()
    kind = module.__name__.rpartition(".")[2]
    with torch.random.fork_rng(devices=devices, device_type=kind):
        torch.manual_seed(int(seed))
        yield


class LayeredCausalLM(CausalLM, LayeredLanguageModel):
    """A library model made of embedding, layers, norm and output layer."""

    def __init__(self, config: CausalLMConfig, theirs: Any) -> None:
        super().__init__(config, theirs)
        inner = theirs.model
        for layer in inner.layers:
            layer.positions = copy.deepcopy(inner.rotary_emb)
            kind = type(layer)
            layer.__class__ = type(kind.__name__, (_Positioned, kind), {})

    def units(self) -> list[nn.Module]:
        """Return the layers in forward order; chaining them gives the whole model."""
        theirs = self._theirs[0]
        inner = theirs.model
        return [inner.embed_tokens, *inner.layers, inner.norm, theirs.lm_head]

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(batch, length, vocab)`` for int64 token ids ``(batch, length)``."""
        return LayeredLanguageModel.forward(self, ids)


class LayeredGPT2(CausalLM, LayeredLanguageModel):
    """The library's GPT-2, made of two embeddings, blocks, norm and output layer."""

    def __init__(self, config: CausalLMConfig, theirs: Any) -> None:
        super().__init__(config, theirs)
        inner = theirs.transformer
        inner.wpe.then = (inner.drop,)  # in a tuple: it is no part of the embedding
        inner.wpe.__class__ = _AddedPositions

    def units(self) -> list[nn.Module]:
        """Return the layers in forward order; chaining them gives the whole model."""
        theirs = self._theirs[0]
        inner = theirs.transformer
        return [inner.wte, inner.wpe, *inner.h, inner.ln_f, theirs.lm_head]

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(batch, length, vocab)`` for int64 token ids ``(batch, length)``."""
        return LayeredLanguageModel.forward(self, ids)


class _AddedPositions(nn.Embedding):
    """GPT-2's embedding of positions; of hidden states instead of numbers it gives their sum."""

    then: tuple[nn.Module]

    def forward(self, given: Tensor) -> Tensor:
        """Return rows of the table for int64 numbers, or hidden states with positions added."""
        if not given.is_floating_point():
            return super().forward(given)
        numbers = torch.arange(given.shape[1], device=given.device)[None]
        return cast(Tensor, self.then[0](given + super().forward(numbers)))


class _Positioned(nn.Module):
    """Mixin of a library layer that computes its own rotary tables."""

    positions: nn.Module

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        """Return the layer's output; without further arguments for whole sequences from position 0.

        No mask is passed: the attention of the library is causal then.
        """
        if not given and not named:
            numbers = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
            tables = self.positions(hidden_states, numbers)
            named = {"position_embeddings": tables, "position_ids": numbers}
        return cast(Tensor, super().forward(hidden_states, *given, **named))
