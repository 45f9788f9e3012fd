"""No averaging: every member trains its own model.

Rounds without tensors still happen periodically: in them members learn of a stop request, and
checkpoints can be taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.clock import RealClock
from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.methods.periodic import NoSync
from atoll.strategies.base import Committed, SyncResult, Traffic
from atoll.strategies.outer.base import OuterDefaults
from atoll.strategies.outer.periodic import outcome
from atoll.strategies.rounds.round_client import RoundClient
from atoll.strategies.traffic import times, volume
from atoll.strategies.vectors.flat import Flat, digest
from atoll.task import Task

BASE = "alone"
"""Sent in place of a digest, because members differ on purpose."""


class NoSyncOuter(OuterDefaults):
    """Train without averaging; see the module's docstring."""

    one_model = False
    inherits = False

    def __init__(self, options: NoSync) -> None:
        """Check the options."""
        if options.every < 1:
            raise ConfigError("every is too small", given=options.every, expected="1 or more")
        self.options = options
        self._exact = make_codec("fp32")

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Prepare rounds without tensors."""
        self._round_client = RoundClient(group, RealClock())
        self._state = Flat.of(task)
        self._held = task.step
        task.free_period()

    def rejoin(self, task: Task) -> None:
        """Keep the own model; only the number of rounds comes from the other members."""
        self._round_client.restart()

    def begin(self, task: Task) -> SyncResult | None:
        """Do nothing: members may start from different parameters."""
        return None

    def sync(self, task: Task) -> SyncResult | None:
        """Run a round without tensors if one is due."""
        return self._meet(task) if task.step % self.options.every == 0 else None

    def finish(self, task: Task) -> SyncResult | None:
        """Run a last round if there were steps since the last one."""
        return self._meet(task) if task.step > self._held else None

    def _meet(self, task: Task) -> SyncResult:
        number = task.round
        nothing = self._round_client.mean_of(
            task, [torch.zeros(1)], codec=self._exact, weight=1.0, key="alone"
        )
        agreed = self._round_client.run(task, nothing, base=BASE)
        task.round, self._held = number + 1, task.step
        task.free_period()
        return outcome(agreed, number, agreed.seconds, digest="", delta_norm=0.0)

    def digest(self, task: Task) -> str:
        """Return the digest of the current parameters and buffers."""
        return digest(self._state.read())

    def committed(self, task: Task) -> Committed:
        """Return the own model: there is no common one."""
        return Committed(task.step, BASE)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the step of the last round."""
        return {"own.held": torch.tensor(self._held)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        if "own.held" in state:
            self._held = int(state["own.held"])

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic: one number per round."""
        meetings = -(-steps // self.options.every)
        return times(volume(self._exact, 1, peers, rank=rank), meetings)
