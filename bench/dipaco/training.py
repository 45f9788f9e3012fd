"""DiPaCo's training in one process: explicit loops, no networking.

A worker trains a path: one module of every level. Dense DiLoCo, independent experts and DiPaCo are
the same loop with other paths: all the same, without a common module, and all combinations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from atoll.models import GPT, GPTConfig

Path = tuple[int, ...]
State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes that all arms share."""

    model: GPTConfig
    batch: int = 8
    lr: float = 3e-3
    inner_steps: int
    """Of a path between two outer steps."""
    steps: int
    """Of a path in all; its learning rate falls over them as half a cosine, to a twentieth."""
    outer_lr: float
    outer_momentum: float

    def rate(self, step: int) -> float:
        """Return the learning rate of a path's step.

        Without decay the arms would differ by how much noise their averages remove.
        """
        share = min(1.0, step / self.steps)
        return self.lr * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * share)))


@dataclass
class Module:
    """One module of one level: its weights and the momentum of its outer step."""

    state: State
    momentum: State


@dataclass
class Worker:
    """A path's model with its own inner optimizer, and the text that it trains on."""

    path: Path
    model: GPT
    optimizer: torch.optim.Optimizer
    draw: torch.Generator
    text: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    step: int = 0


class Modular:
    """A modular model and its workers."""

    def __init__(self, setting: Setting, start: GPT, paths: Sequence[Path], *, seed: int) -> None:
        """Copy all modules from one dense model, as the paper does after its pretraining."""
        self.setting = setting
        self.levels = len(paths[0])
        self.modules: dict[tuple[int, int], Module] = {}
        for path in paths:
            for place in enumerate(path):
                own = {
                    name: value.clone()
                    for name, value in start.state_dict().items()
                    if self.level_of(name) == place[0]
                }
                zeros = {name: torch.zeros_like(value) for name, value in own.items()}
                self.modules[place] = Module(own, zeros)
        self.workers = [
            Worker(
                path, model := copy.deepcopy(start), optimizer_of(model, setting),
                torch.Generator().manual_seed(1000 * seed + number),
            )
            for number, path in enumerate(paths)
        ]  # fmt: skip

    def level_of(self, name: str) -> int:
        """Return the level of a weight: blocks in even parts, the rest at the two ends."""
        if name.startswith("embedding"):
            return 0
        if not name.startswith("blocks."):
            return self.levels - 1
        return int(name.split(".")[1]) * self.levels // self.setting.model.layers

    def load(self, number: int) -> GPT:
        """Return the model of a path with the newest weights of its modules."""
        worker = self.workers[number]
        state: State = {}
        for place in enumerate(worker.path):
            state |= self.modules[place].state
        worker.model.load_state_dict(state)
        return worker.model

    def round(self) -> None:
        """Train all paths from the same modules, then take an outer step in each module."""
        sums: dict[tuple[int, int], list[State]] = {}
        for number, worker in enumerate(self.workers):
            model = self.load(number)
            inner_steps(model, worker, self.setting, self.setting.inner_steps)
            trained = model.state_dict()
            for place in enumerate(worker.path):
                module = self.modules[place]
                delta = {name: value - trained[name] for name, value in module.state.items()}
                sums.setdefault(place, []).append(delta)
        for place, deltas in sums.items():
            self._outer_step(self.modules[place], deltas)

    def _outer_step(self, module: Module, deltas: Sequence[State]) -> None:
        rate, momentum = self.setting.outer_lr, self.setting.outer_momentum
        for name, value in module.state.items():
            mean = torch.stack([delta[name] for delta in deltas]).mean(0)
            moved = module.momentum[name].mul_(momentum).add_(mean)
            value.sub_(rate * (mean + momentum * moved))


def optimizer_of(model: GPT, setting: Setting) -> torch.optim.Optimizer:
    """Return the inner optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=setting.lr, betas=(0.9, 0.95), fused=True)


def inner_steps(model: GPT, worker: Worker, setting: Setting, steps: int) -> None:
    """Take AdamW steps on random windows of the worker's text."""
    context = setting.model.context
    reach = torch.arange(context + 1)
    for _ in range(steps):
        starts = torch.randint(
            len(worker.text) - context, (setting.batch, 1), generator=worker.draw
        )
        windows = worker.text[starts + reach]
        worker.optimizer.zero_grad()
        loss = model.loss(windows[:, :-1], windows[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in worker.optimizer.param_groups:
            group["lr"] = setting.rate(worker.step)
        worker.optimizer.step()
        worker.step += 1


def pretrained(setting: Setting, text: Tensor, *, steps: int, seed: int) -> GPT:
    """Return the dense model that every arm starts from."""
    torch.manual_seed(seed)
    model = GPT(setting.model)
    worker = Worker(
        (0,), model, optimizer_of(model, setting), torch.Generator().manual_seed(seed), text
    )
    constant = replace(setting, steps=1_000_000_000)
    inner_steps(model, worker, constant, steps)
    return model
