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


def continue_text(
    paths: PathFolder,
    ids: Tensor,
    *,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
    every: int | None = None,
    path: int | None = None,
    prepare: Callable[[LanguageModel], LanguageModel] = lambda model: model,
) -> Written:
    """Continue a prompt.

    Args:
        paths: The modular model.
        ids: The prompt, 1-D.
        tokens: Number of tokens to add.
        temperature: As in :meth:`LanguageModel.generate`.
        seed: Of sampling.
        every: Tokens after which a path is chosen again, from the text so far; None: once.
        path: Use this path instead of the router's.
        prepare: Moves a loaded path to its device.

    Raises:
        CheckpointError: the file of a path is missing or damaged.
        ConfigError: the prompt is empty, or there is no such path.
    """
    generator = torch.Generator().manual_seed(seed)
    reader, router = paths.reader(), paths.router
    text = ids.long()
    number = choose_path(paths, ids) if path is None else path
    taken, models = [number], {number: prepare(paths.load(number))}
    left = tokens
    while True:
        step = left if every is None or path is not None else min(every, left)
        model = models[taken[-1]]
        device = next(model.parameters()).device
        with torch.inference_mode():
            text = model.generate(
                text[None].to(device), tokens=step, temperature=temperature, generator=generator
            )[0].cpu()
        left -= step
        if not left:
            return Written(text, tuple(taken))
        seen = reader.features([text[-reader.longest :]], paths.tokenizer)
        taken.append(int(router.choose(seen)[0]))
        if taken[-1] not in models:
            models[taken[-1]] = prepare(paths.load(taken[-1]))
