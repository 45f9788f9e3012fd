"""A GGUF file, as llama.cpp and programs around it read: architecture, tokenizer, weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Llama and families that differ
from it in names only. llama.cpp rotates pairs of neighbouring features where transformers rotates
halves, so the rows of query and key matrices of `llama` are reordered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.errors import ConfigError
from atoll.export.opened import Opened

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Model type of the library -> architecture of llama.cpp."""
TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""How matrices are stored; vectors are always fp32."""


def write_gguf(opened: Opened, file: Path, *, dtype: str, name: str) -> None:
    """Write the whole model with its tokenizer into one file.

    Args:
        opened: The model; adapters are merged.
        file: Overwritten.
        dtype: A key of `TYPES`; `q8_0` is 8 bits with a scale for every 32 numbers.
        name: Shown by programs that read it.

    Raises:
        ConfigError: a library is missing, or the architecture or the tokenizer is not supported.
    """
    gguf = _library()
    model = opened.whole()
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ConfigError(
            "this architecture cannot be written as GGUF", given=config.model_type,
            expected=" or ".join(ARCHITECTURES), remedy="export a folder and convert that with "
            "llama.cpp's convert_hf_to_gguf.py",
        )  # fmt: skip
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type", "default") != "default":
        raise ConfigError(
            "scaled rotary positions cannot be written as GGUF", given=str(scaling),
            expected="the default rotation", remedy="convert an exported folder with llama.cpp",
        )  # fmt: skip
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_name(name)
    _sizes(writer, config, float(scaling.get("rope_theta", 10_000.0)))
    _tokenizer(gguf, writer, opened.tokenizer, int(config.vocab_size))
    kind = gguf.GGMLQuantizationType[TYPES[dtype]]
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers
    )
    tied = bool(config.tie_word_embeddings)
    for ours, tensor in model.state_dict().items():
        if tied and ours == "lm_head.weight":
            continue
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ConfigError(
                "a weight has no name in GGUF", given=ours, expected=f"the names of {architecture}"
            )
        _add(gguf, writer, theirs, _ordered(ours, tensor, config, architecture), kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


_FILE_TYPES = {
    "fp32": "ALL_F32", "fp16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0",
}  # fmt: skip


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "writing GGUF needs a library that is not installed", given=str(error),
            expected="gguf 0.10 or later", remedy="pip install 'atoll[hf]'",
        ) from error  # fmt: skip
    return gguf


def _sizes(writer: Any, config: Any, theta: float) -> None:
    heads = config.num_attention_heads
    features = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(features)
    writer.add_value_length(features)
    writer.add_rope_dimension_count(features)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _tokenizer(gguf: Any, writer: Any, tokenizer: Any, size: int) -> None:
    """Write a byte-level BPE vocabulary; others raise ConfigError."""
    inner = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer is not None else {}
    model = inner.get("model") or {}
    levels = json.dumps([inner.get("pre_tokenizer"), inner.get("decoder")])
    if model.get("type") != "BPE" or "ByteLevel" not in levels:
        raise ConfigError(
            "this tokenizer cannot be written as GGUF", given=str(model.get("type", "none")),
            expected="a byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have",
            remedy="convert an exported folder with llama.cpp",
        )  # fmt: skip
    words = {index: word for word, index in tokenizer.get_vocab().items()}
    added = {one["id"]: one for one in inner.get("added_tokens", ())}
    tokens, kinds = [], []
    for index in range(size):
        tokens.append(words.get(index, f"[PAD{index}]"))
        if index not in words:
            kinds.append(gguf.TokenType.UNUSED)
        elif index in added:
            special = added[index]["special"]
            kinds.append(gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if '"Digits"' in levels else "default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if merges:
        writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(int(number))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _ordered(name: str, tensor: Tensor, config: Any, architecture: str) -> NDArray[np.float32]:
    """Return a weight as llama.cpp wants it, fp32."""
    values = tensor.detach().to(torch.float32).cpu().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if architecture == "llama" and part in name:
            halves = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(values)


def _add(gguf: Any, writer: Any, name: str, values: NDArray[np.float32], kind: Any) -> None:
    """Add a tensor: a matrix in the wanted type if its rows allow that, a vector in fp32."""
    plain = gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    chosen = kind if values.ndim > 1 and values.shape[-1] % block == 0 else plain
    data = values if chosen == plain else gguf.quants.quantize(values, chosen)
    writer.add_tensor(name, data, raw_dtype=chosen)
