"""Record an episode of a policy as a GIF."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from atoll.config.rl_tables import PolicyTable
from atoll.errors import ConfigError, ScriptError
from atoll.rl.environments.environment import (
    Environment,
    install_hint,
    make_environment,
    missing_package,
)

FRAMES = 200
"""Most frames of a GIF: of a longer episode every second, fourth, ... is kept."""
SIDE = 320
"""Most pixels of a frame's longer side."""
COLOURS = 64
STEPS = 2_000
"""Most steps of an episode."""
LONGEST_S = 30.0
"""Time limit for playing and rendering; then the recording ends."""
SHORTEST_MS = 20
"""Shortest time for which browsers show a frame."""
SAMPLES = 8
"""Number of frames that the palette is made from."""
PAUSE_MS = 800
"""How long the last frame is shown."""


class Acted(Protocol):
    """The actions of a policy."""

    @property
    def actions(self) -> Tensor:
        """[B, width]."""
        ...

    @property
    def hidden(self) -> Tensor | None:
        """[B, H], for a recurrent policy."""
        ...


class Greedy(Protocol):
    """A policy that can take its most probable action."""

    def act(
        self, observations: Tensor, hidden: Tensor | None = None, *, greedy: bool = False
    ) -> Acted:
        """Choose actions for observations [B, *shape]."""
        ...

    def initial(self, columns: int) -> Tensor | None:
        """Return the initial recurrent state."""
        ...


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded episode."""

    path: Path
    steps: int
    """Number of steps, at most STEPS and what LONGEST_S allows."""
    score: float
    """The undiscounted return, the mean over the agents."""
    frames: int
    size_bytes: int


def record(policy: Greedy, table: PolicyTable, path: Path, *, seed: int) -> Recording:
    """Play one episode with the most probable actions, and write it as a GIF.

    The policy is not changed; `path` is written atomically.

    Raises:
        ConfigError: the environment cannot render, or a package for it is missing.
        ScriptError: the environment raised.
    """
    environment = _with_pictures(table)
    try:
        film = _Film(environment)
        steps, score = _live(policy, environment, film, seed)
    except Exception as error:
        missing = missing_package(error)  # rendering may need a package that stepping does not
        if missing:
            why = f"the package {missing} is missing"
            raise _no_pictures(table, why, remedy=install_hint(missing)) from error
        raise ScriptError(
            "an environment raised while it was recorded",
            given=f"policy {table.name}, seed {seed}: {type(error).__name__}: {error}",
        ) from error
    finally:
        environment.close()
    if not film.pictures:
        raise _no_pictures(table, "it draws nothing")
    _write(film, path)
    return Recording(path, steps, score, len(film.pictures), path.stat().st_size)


class _Film:
    """Frames of every first, second, fourth, ... step, so that there are at most `FRAMES`."""

    def __init__(self, environment: Environment) -> None:
        self.pictures: list[Any] = []
        self.every = 1
        self._environment = environment

    @property
    def milliseconds(self) -> int:
        """How long a frame is shown."""
        return max(SHORTEST_MS, round(1000 * self.every / self._environment.frames_per_s))

    def after(self, step: int, *, last: bool) -> None:
        """Add a frame after `step`, if one is due."""
        if step % self.every and not last:
            return
        from PIL import Image

        picture = self._environment.render()
        if picture is None:
            return
        image = Image.fromarray(np.ascontiguousarray(picture, np.uint8)).convert("RGB")
        image.thumbnail((SIDE, SIDE))
        self.pictures.append(image)
        if len(self.pictures) > FRAMES and not last:
            self.pictures = self.pictures[::2]
            self.every *= 2


def _with_pictures(table: PolicyTable) -> Environment:
    try:
        return make_environment(table, render=True)
    except ConfigError as error:
        raise _no_pictures(table, str(error.given), remedy=error.remedy) from error


def _live(policy: Greedy, environment: Environment, film: _Film, seed: int) -> tuple[int, float]:
    """Record an episode; return its steps and its return."""
    hidden, shape = policy.initial(environment.agents), (environment.agents, -1)
    observation = environment.reset(seed)
    steps, score, over = 0, 0.0, False
    deadline = time.monotonic() + LONGEST_S
    film.after(0, last=False)
    while not over and steps < STEPS and time.monotonic() < deadline:
        observed = np.array(observation, np.float32).reshape(shape)
        acted = policy.act(torch.from_numpy(observed), hidden, greedy=True)
        hidden = acted.hidden
        observation, reward, _, _, over = environment.step(acted.actions.numpy())
        steps, score = steps + 1, score + float(np.mean(reward))
        film.after(steps, last=over)
    return steps, score


def _write(film: _Film, path: Path) -> None:
    from PIL import Image

    images = film.pictures
    # One palette for all frames: then only the pixels that change are stored.
    width, height = images[0].size
    some = images[:: max(1, len(images) // SAMPLES)]
    together = Image.new("RGB", (width, height * len(some)))
    for i, image in enumerate(some):
        together.paste(image, (0, i * height))
    palette = together.quantize(COLOURS)
    first, *rest = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    times = [film.milliseconds] * len(rest) + [PAUSE_MS]
    partial = path.with_name(path.name + ".part")
    try:
        first.save(
            partial, format="GIF", save_all=True, append_images=rest, duration=times, loop=0,
        )  # fmt: skip
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _no_pictures(table: PolicyTable, why: str, *, remedy: str | None = None) -> ConfigError:
    return ConfigError(
        f"policy {table.name} cannot be recorded", given=f"env = {table.env!r}: {why}",
        expected='an environment with render_mode "rgb_array"',
        remedy=remedy or "let the factory accept render_mode and pass it on, or set record = false",
    )  # fmt: skip
