"""A trained model as one of `transformers`, with its tokenizer: what every format starts from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.checkpoint import load_weights
from atoll.checkpoint.format.weights import Weights
from atoll.config.tables import JobSpec
from atoll.data import ByteTokenizer, Tokenizer, tokenizer_from_json
from atoll.data.tuning.rendering import CHATML
from atoll.errors import AtollError, CheckpointError, ConfigError
from atoll.models.adapted import FULL, Adapter, peft
from atoll.models.pretrained import CausalLMConfig, library, load_tokenizer, make_pretrained

LIBRARY_NAME, LLAMA = "transformers", "llama"
"""Names of models that can be exported."""

_LLAMA_NAMES = (
    ("embedding.", "model.embed_tokens."), ("norm.", "model.norm."), ("head.", "lm_head."),
    (".norm_attention.", ".input_layernorm."), (".norm_mlp.", ".post_attention_layernorm."),
    (".attention.queries.", ".self_attn.q_proj."), (".attention.keys.", ".self_attn.k_proj."),
    (".attention.values.", ".self_attn.v_proj."), (".attention.merge.", ".self_attn.o_proj."),
    (".gate.", ".mlp.gate_proj."), (".up.", ".mlp.up_proj."), (".down.", ".mlp.down_proj."),
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A trained model.

    Attributes:
        weights: As they were saved.
        tokenizer: Of `transformers`; None: the run's cannot be expressed by the library.
        base: Source of the pretrained model that the adapters belong to; empty: no adapters.
    """

    weights: Weights
    tokenizer: Any | None
    base: str

    def adapted(self) -> Any:
        """Return the base with its trained adapters, a model of `peft`.

        Raises:
            ConfigError: the run trained no adapters, or a library is missing.
            CheckpointError: the adapters do not belong to this base.
        """
        if not self.base:
            raise ConfigError(
                "there are no adapters to export", given="a run that trained all weights",
                expected="a run of `atoll tune` with lora, dora or qlora",
                remedy="export the whole model: leave --adapter out",
            )  # fmt: skip
        config = CausalLMConfig(**self.weights.options)
        adapter = Adapter.of(config.adapter)
        module = peft()
        # A base in 4 bits was rounded in training only; adapters are added to it as published.
        plain = replace(config, adapter={**config.adapter, "method": "lora"})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between versions of the two libraries
            theirs = module.get_peft_model(make_pretrained(plain), adapter.config())
        state = {f"base_model.model.{name}": one for name, one in self.weights.state.items()}
        _missing, unknown = theirs.load_state_dict(state, strict=False)
        trained = {name for name, one in theirs.named_parameters() if one.requires_grad}
        if unknown or trained - state.keys():
            names = [*unknown, *sorted(trained - state.keys())]
            raise CheckpointError(
                "the adapters do not fit their base", given=f"{self.base}: {names[0]}",
                expected="the model that they were trained on",
            )  # fmt: skip
        return theirs.eval()

    def whole(self) -> Any:
        """Return the model with all weights, adapters merged, in fp32 and ready to evaluate.

        Raises:
            ConfigError: no model of `transformers` computes the same.
            CheckpointError: the weights do not fit.
        """
        if self.base:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return self.adapted().merge_and_unload().eval()
        name, options = self.weights.model, self.weights.options
        if name == LIBRARY_NAME:
            theirs = make_pretrained(CausalLMConfig(**options))
            return _loaded(theirs, self.weights.state)
        if name == LLAMA:
            return _loaded(_llama(options), _llama_state(self.weights.state))
        raise ConfigError(
            "no model of transformers computes the same as this one", given=f"a model {name!r}",
            expected=f"models {LIBRARY_NAME!r} and {LLAMA!r}",
            remedy="any program reads model.safetensors; atoll.checkpoint.load_weights rebuilds it",
        )  # fmt: skip


def open_model(file: Path, *, spec: JobSpec | None = None) -> Opened:
    """Open the weights of a run.

    Args:
        file: `model.safetensors`, or the shared part of a checkpoint.
        spec: The job, if it is known: it names the source of the tokenizer and the chat template.

    Raises:
        CheckpointMissing: the file does not exist.
        CheckpointCorrupt: it is damaged.
        ConfigError: a library is missing.
    """
    library()
    weights = load_weights(file)
    adapter = weights.options.get("adapter") or {}
    adapted = bool(adapter) and adapter.get("method") != FULL
    options: Mapping[str, Any] = weights.options
    base = ""
    if adapted:
        base = str(options.get("source") or "a model made from its configuration")
    return Opened(weights, _tokenizer(weights, spec), base)


def _tokenizer(weights: Weights, spec: JobSpec | None) -> Any | None:
    """Return the tokenizer that was published with the model, else one made from the weights'."""
    if weights.model == LIBRARY_NAME:
        options = dict(weights.options) if weights.options.get("source") else {}
        if not options and spec is not None and spec.model.options.get("source"):
            options = dict(spec.model.options)
        named: dict[str, Any] = {
            key: str(options[key]) for key in ("source", "gguf") if options.get(key)
        }
        try:
            found = load_tokenizer(CausalLMConfig(**named)) if named else None
        except AtollError:
            found = None  # it is not on this machine
        if found is not None:
            return _with_template(found, spec)
    own = json.loads(weights.tokenizer)
    if own.get("name") == "model":
        return _with_template(_fast(own["pretrained"], weights), spec)
    tokenizer = tokenizer_from_json(weights.tokenizer)
    return _bytes(tokenizer)


def _with_template(tokenizer: Any, spec: JobSpec | None) -> Any:
    template = spec.tune.template if spec is not None else ""
    if template:
        tokenizer.chat_template = CHATML if template == "chatml" else template
    return tokenizer


def _fast(inner: Mapping[str, Any], weights: Weights) -> Any:
    """Return a tokenizer of `transformers` from one of `tokenizers`."""
    from tokenizers import Tokenizer as Inner

    made = Inner.from_str(json.dumps(inner))
    config: Mapping[str, Any] = weights.options.get("config") or {}
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    named = {} if end is None else {"eos_token": made.id_to_token(int(end))}
    return library().PreTrainedTokenizerFast(tokenizer_object=made, **named)


def _bytes(tokenizer: Tokenizer) -> Any | None:
    """Return the byte tokenizer as one of `transformers`; None for a vocabulary of Atoll's own."""
    if not isinstance(tokenizer, ByteTokenizer):
        return None
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    ids = {character: byte for byte, character in enumerate(byte_characters())}
    inner = Inner(models.BPE(vocab=ids, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return library().PreTrainedTokenizerFast(tokenizer_object=inner)


def byte_characters() -> list[str]:
    """Return the character that byte-level vocabularies write for each byte, 256 of them.

    GPT-2's: printable Latin-1 characters stand for themselves, the others follow from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    found, following = [], 256
    for byte in range(256):
        if byte in printable:
            found.append(chr(byte))
        else:
            found.append(chr(following))
            following += 1
    return found


def _llama(options: Mapping[str, Any]) -> Any:
    """Return an empty Llama of the library with the sizes of Atoll's own."""
    from atoll.models.llama import LlamaConfig

    config = LlamaConfig(**options)
    transformers = library()
    described = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.inside,
        num_hidden_layers=config.layers, num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads or config.heads, rms_norm_eps=1e-5,
        max_position_embeddings=config.context, tie_word_embeddings=config.tie,
        rope_parameters={"rope_type": "default", "rope_theta": config.theta},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(described)


def _llama_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of Atoll's Llama under the library's names."""
    found = {}
    for name, tensor in state.items():
        theirs = f"model.layers.{name.removeprefix('blocks.')}" if "blocks." in name else name
        for ours, other in _LLAMA_NAMES:
            if ours.startswith("."):
                theirs = theirs.replace(ours, other)
            elif name.startswith(ours):
                theirs = other + name.removeprefix(ours)
        found[theirs] = tensor
    return found


@torch.no_grad()
def _loaded(theirs: Any, state: Mapping[str, Tensor]) -> Any:
    missing, unknown = theirs.load_state_dict(dict(state), strict=False)
    tied = set(getattr(theirs, "_tied_weights_keys", None) or ())
    wrong = [*(name for name in missing if name not in tied), *unknown]
    if wrong:
        raise CheckpointError(
            "the weights do not fit the model that the file names", given=", ".join(wrong[:3]),
            remedy="use the version of Atoll that wrote it",
        )  # fmt: skip
    theirs.tie_weights()
    return theirs.eval()
