"""One training process: the same model, texts and loop whatever keeps the members together.

Each writes lines of JSON to a file of its own; times are those of the monotonic clock, which all
processes of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import Parameter

from bench.peers.setting import Batches, flat, read_setting

GO = "go"
"""The file that lets all members begin."""


def notes_of(slot: int) -> str:
    """Return a pattern of the names of a member's files; a restarted one has several."""
    return f"w{slot}-*.jsonl"


def state_of(slot: int) -> str:
    """Return the name of the file with a member's last parameters."""
    return f"end{slot}.npy"


class Member:
    """A model, its inner optimizer and its text."""

    def __init__(self, folder: Path, slot: int) -> None:
        """Build everything; nothing is trained yet."""
        torch.set_num_threads(1)
        self.folder, self.slot, self.setting = folder, slot, read_setting(folder)
        self.model = self.setting.make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.setting.lr)
        self._batches = Batches(self.setting, folder, slot)
        path = folder / f"w{slot}-{os.getpid()}.jsonl"
        self._notes = path.open("w", encoding="utf-8", buffering=1)
        self._used_s = 0.0

    def note(self, kind: str, **about: Any) -> None:
        """Write one line."""
        self._notes.write(json.dumps({"kind": kind, "at": time.monotonic(), **about}) + "\n")

    def wait_for_all(self) -> None:
        """Say that this member is connected, and wait until all are."""
        self.note("ready", pid=os.getpid())
        while not (self.folder / GO).exists():
            time.sleep(0.005)
        self._used_s = time.process_time()

    def train(
        self,
        step: Callable[[], object],
        *,
        done: Callable[[], int] | None = None,
        tokens: Any = None,
    ) -> None:
        """Do all steps.

        Args:
            step: Called instead of the optimizer's; exchanges with the others when it is time.
            done: Tells how many steps are done; None: those of this loop.
            tokens: Called with the loss and the number of bytes of every step.
        """
        count = 0
        while (number := count if done is None else done()) < self.setting.steps:
            inputs, targets = self._batches.next()
            self.optimizer.zero_grad()
            loss = self.model.loss(inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if tokens is not None:
                tokens(loss=loss.detach(), tokens=targets.numel())
            step()
            count += 1
            self.note("step", step=number + 1)

    def end(self) -> None:
        """Leave the parameters behind."""
        np.save(self.folder / state_of(self.slot), flat(self.model))
        self.note("done", cpu_s=time.process_time() - self._used_s)


class OuterNesterov:
    """DiLoCo's outer step by hand: `start - now` is the gradient of SGD with Nesterov momentum."""

    def __init__(self, parameters: list[Parameter], *, lr: float, momentum: float) -> None:
        """Begin at the present parameters."""
        self._parameters = parameters
        self._start = [parameter.detach().clone() for parameter in parameters]
        self._sgd = torch.optim.SGD(parameters, lr, momentum=momentum, nesterov=True)

    @torch.no_grad()
    def deltas(self) -> list[torch.Tensor]:
        """Return the pseudo-gradients, one for each parameter."""
        pairs = zip(self._start, self._parameters, strict=True)
        return [start - parameter for start, parameter in pairs]

    @torch.no_grad()
    def apply(self, means: list[torch.Tensor]) -> None:
        """Step from the start with the members' mean, and begin anew there."""
        for parameter, start, mean in zip(self._parameters, self._start, means, strict=True):
            parameter.copy_(start)
            parameter.grad = mean
        self._sgd.step()
        for parameter, start in zip(self._parameters, self._start, strict=True):
            start.copy_(parameter)
