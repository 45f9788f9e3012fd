"""The small model of features, when a user has none: a GPT that is trained for a short while."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from atoll.checkpoint import Weights
from atoll.data import Dataset, Tokenizer, tokenizer_from_json
from atoll.errors import DataError
from atoll.models import GPT, GPTConfig, restored
from atoll.routing.features import PREFIX, FeatureModel

STEPS = 300
BATCH = 16
LR = 3e-3
MODEL = "gpt"
CONTEXT = 128


def train_reader(
    dataset: Dataset,
    *,
    seed: int,
    steps: int = STEPS,
    progress: Callable[[int, int], bool] = lambda done, steps: True,
) -> Weights | None:
    """Train a small GPT on random windows of the training tokens; return its weights.

    The same arguments give the same model on the same machine.

    Args:
        dataset: What to train on.
        seed: Of weights and windows.
        steps: Optimizer steps.
        progress: Called after each step with its number and `steps`; False ends the training.

    Returns:
        Weights, or None if `progress` ended it.

    Raises:
        DataError: there are fewer tokens than one window.
    """
    if len(dataset.train) <= CONTEXT + 1:
        raise DataError(
            "too little text to train the small model of features",
            given=f"{len(dataset.train)} tokens", expected=f"more than {CONTEXT + 1}",
            remedy="more text, or a trained model (--reader)",
        )  # fmt: skip
    config = _config(dataset.tokenizer)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    reach = torch.arange(CONTEXT + 1)
    for step in range(1, steps + 1):
        starts = torch.randint(len(dataset.train) - CONTEXT, (BATCH, 1), generator=generator)
        windows = dataset.train[starts + reach].long()
        optimizer.zero_grad()
        loss = model.loss(windows[:, :-1], windows[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not progress(step, steps):
            return None
    state = {name: value.detach() for name, value in model.state_dict().items()}
    return weights_of(state, dataset.tokenizer)


def weights_of(state: Mapping[str, Tensor], tokenizer: Tokenizer) -> Weights:
    """Return the weights of a model of :func:`train_reader` from its tensors."""
    options = dataclasses.asdict(_config(tokenizer))
    return Weights(dict(state), MODEL, options, tokenizer.to_json(), {})


def _config(tokenizer: Tokenizer) -> GPTConfig:
    return GPTConfig(
        vocab_size=tokenizer.vocab_size, layers=2, width=64, heads=4, context=CONTEXT, tie=False
    )


def reader_of(
    weights: Weights, *, prefix: int = PREFIX, tokenizer: Tokenizer | None = None
) -> FeatureModel:
    """Return the small model of some weights.

    Args:
        weights: Of a language model with units.
        prefix: Tokens that choose a path.
        tokenizer: That of the data, to be used if it equals the model's own.

    Raises:
        CheckpointError: the weights do not fit the model that they name.
        ConfigError: the model has no units, or reads less than the prefix.
    """
    model = restored(weights.model, weights.options, weights.state, where="the small model")
    if tokenizer is not None and tokenizer.to_json() == weights.tokenizer:
        return FeatureModel(model, tokenizer, prefix)
    return FeatureModel(model, tokenizer_from_json(weights.tokenizer), prefix)
