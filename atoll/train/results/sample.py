"""Sample text of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import nn

from atoll.checkpoint import load_weights
from atoll.data import Tokenizer, tokenizer_from_json
from atoll.devices.choose import device_of_model
from atoll.errors import ConfigError
from atoll.models import LanguageModel, restored

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
    model = restored(weights.model, weights.options, weights.state, where=str(path))
    return model, tokenizer_from_json(weights.tokenizer)


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
    ids = ids.to(device_of_model(cast(nn.Module, model)))
    generator = torch.Generator().manual_seed(seed)
    written = model.generate(ids[None], tokens=tokens, temperature=temperature, generator=generator)
    return tokenizer.decode(written[0].cpu()).decode("utf-8", errors="replace")
