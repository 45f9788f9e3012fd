"""A state at the beginning of a period or between two steps, as members hand it over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from atoll.errors import WireError
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task
from atoll.train.verification.own_part import load_own, own_bytes
from atoll.verification.state_file import LINE_BYTES, heading, read_heading


@dataclass(frozen=True, slots=True)
class KeptState:
    """The model as one vector (float32, shape (n,)), and the own part's bytes."""

    model: Tensor
    own: bytes

    @classmethod
    def of(cls, task: Task, flat: Flat) -> KeptState:
        """Return a copy of a task's state."""
        return cls(flat.read(), b"".join(own_bytes(task.optimizer)))

    def load(self, task: Task, flat: Flat) -> None:
        """Load the state into a task of the same job.

        Raises:
            ConfigError: the model has another number of values.
            WireError: the own part does not fit.
        """
        flat.write(self.model)
        load_own(task.optimizer, self.own)

    def write(self, path: Path) -> None:
        """Write the file that a hub can check."""
        data = self.model.numpy().tobytes()
        with path.open("wb") as file:
            file.write(heading(len(data)))
            file.write(data)
            file.write(self.own)

    @classmethod
    def read(cls, path: Path) -> KeptState:
        """Read a file that `write` has written.

        Raises:
            WireError: it is no state.
        """
        with path.open("rb") as file:
            size = read_heading(file.readline(LINE_BYTES))
            data = bytearray(file.read(size))
            if len(data) != size or size % 4 or not size:
                raise WireError("this state is cut off", given=f"{len(data)} of {size} bytes")
            return cls(torch.frombuffer(data, dtype=torch.float32), file.read())
