"""Base class of decentralized strategies, whose members carry different models.

Members start from the same parameters, exchange with some of the others every `every` steps, and
average all models only when the run ends. In between they agree on which rounds took place and what
was sent: joining members compare the chain of the rounds' digests. A joining member copies the
model of one donor; a checkpoint stores every member's model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.digest import Digest
from atoll.errors import ConfigError, LossNotFinite
from atoll.group.base import Group
from atoll.strategies.base import Committed, SyncResult, Traffic
from atoll.strategies.codec_selection import codec_state, load_codec_state
from atoll.strategies.outer.base import OuterDefaults
from atoll.strategies.outer.periodic import outcome, start_volume
from atoll.strategies.rounds.all_to_all import VectorAllToAll
from atoll.strategies.rounds.initial_sync import broadcast_start
from atoll.strategies.rounds.round_client import RoundClient
from atoll.strategies.traffic import all_to_all_volume, total, volume
from atoll.strategies.vectors.flat import Flat, digest, length
from atoll.task import Task

BASE = "shared.base"
COUNTERS = "own.counters"


class DecentralizedOuter(OuterDefaults, ABC):
    """Members with models of their own; see the module's docstring."""

    one_model = False
    one_state = False

    def __init__(self, *, every: int, clock: Clock | None = None) -> None:
        """Run a round every `every` steps.

        Raises:
            ConfigError: `every` is less than 1.
        """
        if every < 1:
            raise ConfigError("every is too small", given=every, expected="1 or more")
        self._every = every
        self._clock: Clock = clock if clock is not None else RealClock()
        self._base = "start"
        self._next = every
        self._resumed = False
        """Whether the last loaded state was this member's own, not a donor's."""

    # ------------------------------------------------------- what a subclass decides

    @abstractmethod
    def _round(self, task: Task) -> SyncResult | None:
        """Run a round, or begin one."""

    @abstractmethod
    def _round_volume(self, elements: int, peers: int, *, round_: int, rank: int) -> Traffic:
        """Return the bytes of one round."""

    @property
    def _own_weight(self) -> float:
        """The weight of this member's model in the final mean."""
        return 1.0

    def _stand(self, task: Task) -> None:
        """Make the current model this member's base for the next round."""

    # --------------------------------------------------------------------- steps and rounds

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Prepare the vectors; sends nothing yet.

        Raises:
            ConfigError: the codec does not encode whole vectors.
        """
        self._group, self._codec = group, codec
        self._all_to_all = VectorAllToAll(group, codec)
        self._round_client = RoundClient(group, self._clock, codec=codec)
        self._flat = Flat.of(task)
        codec.set_shapes(self._flat.shapes)
        self._num_parameters = task.num_parameters
        self._scratch = self._flat.new()
        self._stand(task)
        self._plan(task)

    def begin(self, task: Task) -> SyncResult | None:
        """Broadcast the first member's parameters to all members."""
        number = task.round
        vector, rounds = broadcast_start(task, self._flat, self._round_client, base=self._base)
        self._base = digest(vector)
        self._stand(task)
        self._plan(task)
        seconds = {k: sum(agreed.seconds[k] for agreed in rounds) for k in rounds[0].seconds}
        return outcome(rounds[-1], number, seconds, digest=self._base, delta_norm=0.0)

    def sync(self, task: Task) -> SyncResult | None:
        """Run a round if one is due."""
        if task.step < self._next:
            return None
        result = self._round(task)
        self._plan(task)
        return result

    def finish(self, task: Task) -> SyncResult | None:
        """Average all models exactly and uncompressed."""
        entered = self._clock.monotonic()
        now = self._flat.read(self._scratch)
        self._check(now, task)
        number, prepare_s = task.round, self._clock.monotonic() - entered
        exchange = self._round_client.mean_of(
            task, [now], codec=make_codec("fp32"), weight=self._own_weight, key="finish"
        )
        agreed = self._round_client.run(task, exchange, base=self._base)
        began = self._clock.monotonic()
        mean = agreed.reduced.tensors[0]
        moved = length(mean - now)
        self._flat.write(mean)
        self._stand(task)
        self._advance(task, agreed.reduced.digest)
        seconds = agreed.seconds | {"prepare": prepare_s, "apply": self._clock.monotonic() - began}
        return outcome(agreed, number, seconds, digest=self._base, delta_norm=moved)

    def _plan(self, task: Task) -> None:
        """Start the period until the next round."""
        self._next = (task.step // self._every + 1) * self._every
        task.begin_period(self._next)

    def _check(self, vector: Tensor, task: Task) -> float:
        """Return the norm of a vector that is about to be sent.

        Raises:
            LossNotFinite: it is not finite.
        """
        norm = length(vector)
        if not math.isfinite(norm):
            raise LossNotFinite(
                "the parameters are not finite; they were not given to others",
                given=f"member {task.member}, step {task.step}",
                expected="finite parameters",
                remedy="lower the learning rate, or clip the gradients",
            )
        return norm

    def _advance(self, task: Task, digest_: str) -> None:
        """Record a committed and applied round."""
        chain = (self._base + digest_).encode()
        self._base = Digest(chain).hexdigest()
        task.round += 1

    # ----------------------------------------------------------------------------- state

    def digest(self, task: Task) -> str:
        """Return the digest of this member's own parameters and buffers."""
        return digest(self._flat.read(self._scratch))

    def committed(self, task: Task) -> Committed:
        """Return the member's model: there is no common one."""
        return Committed(task.step, self._base)

    def rejoin(self, task: Task) -> None:
        """Restart the counters, or restore this member's own; see :meth:`Outer.rejoin`."""
        self._round_client.restart()
        if self._resumed and self._next > task.step:
            task.begin_period(self._next)
        else:
            self._plan(task)
        self._resumed = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return the digest chain, the counter and the codec's residuals."""
        base = torch.tensor(list(self._base.encode()), dtype=torch.uint8)
        own = {BASE: base, COUNTERS: torch.tensor([self._next])}
        return own | codec_state(self._codec)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state; of another member's state only the shared part."""
        self._base = bytes(state[BASE].tolist()).decode()
        self._resumed = COUNTERS in state
        if self._resumed:
            self._next = int(state[COUNTERS][0])
        load_codec_state(self._codec, state)

    _last_rounds = 0
    """Rounds at the end in which no values are sent."""

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        start, end = start_volume(peers, rank=rank), volume(
            make_codec("fp32"), elements, peers, rank=rank
        )  # fmt: skip
        rounds = [
            self._round_volume(elements, peers, round_=number, rank=rank)
            for number in range(1, 1 + self._rounds(steps))
        ]
        return total([start, *rounds, *[all_to_all_volume([], [])] * self._last_rounds, end])

    def _rounds(self, steps: int) -> int:
        """Return the number of rounds between start and end."""
        return steps // self._every
