"""Sample text of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from atoll.checkpoint import load_weights
from atoll.data import Tokenizer, tokenizer_from_json
from atoll.errors import CheckpointError, ConfigError
from atoll.models import TEXT, LanguageModel, build_model, model_row

SAMPLE_PROMPT = "def "
"""Prompt of a run's sample; the default corpus is Python source."""

SAMPLE_TOKENS = 240
"""Length of the sample: a few lines."""


def load_model(path: Path) -> tuple[LanguageModel, Tokenizer]:
    """Return language model and tokenizer of `model.safetensors` or a checkpoint's shared part.

    Raises:
        CheckpointMissing: the file does not exist.
        CheckpointCorrupt: it is damaged.
        CheckpointError: its weights do not fit the model it names.
        ConfigError: the model is not a language model.
    """
    weights = load_weights(path)
    if model_row(weights.model).data != TEXT:
        raise ConfigError(
            "this model writes no text",
            given=f"{path}: {weights.model}, which takes {model_row(weights.model).data}",
            expected="a language model",
        )
    model = build_model(weights.model, **weights.options)
    try:
        model.load_state_dict(weights.state)
    except RuntimeError as error:
        raise CheckpointError(
            "the weights do not fit the model that the file names",
            given=f"{path}: {' '.join(str(error).split())[:300]}",
            remedy="use the version of Atoll that wrote it",
        ) from error
    model.eval()
    return cast(LanguageModel, model), tokenizer_from_json(weights.tokenizer)


def write_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Return the prompt and the model's continuation; bytes that are not UTF-8 show as �.

    Raises:
        ConfigError: the prompt is empty.
    """
    ids = tokenizer.encode(prompt.encode("utf-8")).long()
    if not len(ids):
        raise ConfigError("nothing to continue", given="an empty prompt", expected="some text")
    generator = torch.Generator().manual_seed(seed)
    written = model.generate(ids[None], tokens=tokens, temperature=temperature, generator=generator)
    return tokenizer.decode(written[0]).decode("utf-8", errors="replace")
