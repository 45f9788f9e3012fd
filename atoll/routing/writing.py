"""Text from a modular model: a router chooses the path, and only that path is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.models.language import LanguageModel
from atoll.routing.folder import PathFolder


@dataclass(frozen=True, slots=True)
class Written:
    """Token ids of prompt and continuation, 1-D, and the path of each stretch."""

    ids: Tensor
    paths: tuple[int, ...]


def choose_path(paths: PathFolder, ids: Tensor) -> int:
    """Return the path for the beginning of a text, which may be shorter than the prefix.

    Args:
        paths: The modular model.
        ids: Token ids of the text, 1-D.

    Raises:
        ConfigError: the text is empty.
    """
    if not len(ids):
        raise ConfigError("nothing to continue", given="an empty prompt", expected="some text")
    seen = paths.reader().features([ids[: paths.router.prefix]], paths.tokenizer)
    return int(paths.router.choose(seen)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a modular model writes."""

    tokens: int
    """Number of tokens to add."""
    temperature: float = 0.8
    """As in :meth:`LanguageModel.generate`."""
    seed: int = 0
    every: int | None = None
    """Tokens after which a path is chosen again, from the text so far; None: once."""
    path: int | None = None
    """Use this path instead of the router's."""


def continue_text(
    paths: PathFolder,
    ids: Tensor,
    options: Sampling,
    *,
    prepare: Callable[[LanguageModel], LanguageModel] = lambda model: model,
) -> Written:
    """Continue a prompt.

    Args:
        paths: The modular model.
        ids: The prompt, 1-D.
        options: How it writes.
        prepare: Moves a loaded path to its device.

    Raises:
        CheckpointError: the file of a path is missing or damaged.
        ConfigError: the prompt is empty, or there is no such path.
    """
    generator = torch.Generator().manual_seed(options.seed)
    reader, router = paths.reader(), paths.router
    text = ids.long()
    number = choose_path(paths, ids) if options.path is None else options.path
    used, models = [number], {number: prepare(paths.load(number))}
    left = options.tokens
    while True:
        step = (
            left if options.every is None or options.path is not None else min(options.every, left)
        )
        model = models[used[-1]]
        device = next(model.parameters()).device
        with torch.inference_mode():
            text = model.generate(
                text[None].to(device), tokens=step, temperature=options.temperature,
                generator=generator,
            )[0].cpu()  # fmt: skip
        left -= step
        if not left:
            return Written(text, tuple(used))
        seen = reader.features([text[-reader.longest :]], paths.tokenizer)
        used.append(int(router.choose(seen)[0]))
        if used[-1] not in models:
            models[used[-1]] = prepare(paths.load(used[-1]))
