"""Rounds that run during training: started at one step, with the result applied at a later one.

A checkpoint cannot contain a running round, so it waits for the decision and stores the result. A
member that loads it applies the result at the same step as the others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.digest import Digest
from atoll.errors import AtollError, PeerLost
from atoll.group.base import Reduced, Work
from atoll.group.run_round import CommittedRound
from atoll.strategies.base import HIDDEN
from atoll.strategies.rounds.compressed_allreduce import CompressedMean
from atoll.strategies.rounds.exchange import ExchangeResult
from atoll.strategies.rounds.round_client import RoundClient
from atoll.task import Task

log = logging.getLogger(__name__)

PENDING = "own.pending."
"""Prefix of the keys under which a state stores a result that was not applied yet."""


@dataclass(frozen=True, slots=True)
class Means:
    """The reduces of one round, as one decision."""

    vectors: tuple[Tensor, ...]
    contributors: tuple[str, ...]
    """Members with values in them."""
    weight: float
    digest: str

    @classmethod
    def of(cls, found: Sequence[Reduced]) -> Self:
        """Combine several one-vector reduces; raises PeerLost if their contributors differ."""
        if any(one.contributors != found[0].contributors for one in found):
            raise PeerLost("a member was lost between the parts of a round")
        text = " ".join(one.digest for one in found).encode()
        many = Digest(text).hexdigest()
        return cls(
            tuple(one.tensors[0] for one in found),
            found[0].contributors,
            found[0].weight,
            found[0].digest if len(found) == 1 else many,
        )


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round."""

    vectors: tuple[Tensor, ...]
    contributors: tuple[str, ...]
    weight: float
    alone: bool
    """No other member took part."""
    seconds: Mapping[str, float]
    """Phases; `reduce` is the time waited for, `hidden` the time that passed during training."""
    delay: int = 0
    """Steps that hide the next round, as all members know it from the verdict; 0: unknown."""
    sent_bytes: int = 0
    received_bytes: int = 0
    aborted: int = 0

    @classmethod
    def of(cls, agreed: CommittedRound[Means], seconds: Mapping[str, float]) -> Self:
        """Return the result of a committed round."""
        means = agreed.reduced
        return cls(
            means.vectors, means.contributors, means.weight, agreed.plan.route == "alone",
            seconds, agreed.verdict.delay, agreed.sent_bytes, agreed.received_bytes,
            agreed.attempts - 1,
        )  # fmt: skip


@dataclass(slots=True)
class BackgroundRound:
    """A running round, or a result that waits to be applied."""

    step: int
    """Step at which it was started."""
    prepare_s: float
    """Duration of its start, during which training paused."""
    work: Work[CommittedRound[Means]] | None
    """None: the result was loaded from a saved state."""
    loaded: RoundResult | None = None

    def land(self, task: Task, round_client: RoundClient, clock: Clock) -> RoundResult:
        """Wait for the result and apply the verdict to the task.

        Raises:
            LeftBehind: the others committed without this member, which has to recover.
            GroupLeft: this member leaves.
            GroupError: no attempt was committed.
        """
        if self.work is None:
            if self.loaded is None:
                raise RuntimeError("a round is either under way or loaded")
            task.round = round_client.group.committed_round
            return self.loaded
        entered = clock.monotonic()
        with task.state_lock.resting():
            agreed = self.work.wait()
        waited_s = clock.monotonic() - entered
        round_client.apply_verdict(task, agreed, ahead=True)
        task.round += 1
        whole_s = sum(agreed.seconds.values())
        seconds = {"prepare": self.prepare_s, "join": 0.0, "reduce": waited_s, "commit": 0.0}
        return RoundResult.of(agreed, seconds | {HIDDEN: max(0.0, whole_s - waited_s)})

    def end(self) -> None:
        """Wait for the end of a running round, and ignore its result."""
        if self.work is not None:
            try:
                self.work.wait()
            except AtollError as error:
                log.info("a background round failed: %s", error)

    def state(self) -> dict[str, Tensor]:
        """Return the result once it is known; empty if the round failed.

        A state without it is that before the round; `land` raises the error.
        """
        found = self.loaded
        if self.work is not None:
            try:
                found = RoundResult.of(self.work.wait(), {})
            except AtollError as error:
                log.info("the state is saved without the round under way: %s", error)
        if found is None:
            return {}
        return {
            PENDING + "facts": torch.tensor(
                [self.step, found.weight, found.alone, found.delay], dtype=torch.float64
            ),
            PENDING + "contributors": _text(" ".join(found.contributors)),
            **{f"{PENDING}{number}": vector for number, vector in enumerate(found.vectors)},
        }

    @classmethod
    def load(cls, state: Mapping[str, Tensor]) -> Self | None:
        """Return the round stored in a state, or None."""
        facts = state.get(PENDING + "facts")
        if facts is None:
            return None
        step, weight, alone, delay = facts.tolist()
        count = sum(key.startswith(PENDING) for key in state) - 2
        vectors = tuple(state[f"{PENDING}{number}"].clone() for number in range(count))
        seconds = dict.fromkeys(("prepare", "join", "reduce", "commit"), 0.0)
        names = bytes(state[PENDING + "contributors"].tolist()).decode().split()
        landed = RoundResult(vectors, tuple(names), weight, bool(alone), seconds, int(delay))
        return cls(int(step), 0.0, None, landed)


def _text(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


Found = ExchangeResult[tuple[CompressedMean, Tensor | None]]
"""Result of a round's exchanges: the differences, and the mean of the buffers."""

_PENDING = "pending."


@dataclass(frozen=True, slots=True)
class CompressedResult:
    """The result of a compressed round, as it is applied or saved."""

    squeezed: CompressedMean
    moved: Tensor
    """Change of the buffers."""
    contributors: tuple[str, ...]
    weight: float
    digest: str

    @classmethod
    def of(cls, found: Found, buffers: Tensor) -> Self:
        """Return the result of a round that began with these buffers."""
        squeezed, mean = found.value
        moved = torch.zeros_like(buffers) if mean is None else mean - buffers
        return cls(squeezed, moved, found.contributors, found.weight, found.digest)

    def state(self) -> dict[str, Tensor]:
        """Return it as part of a saved state; keys `shared.*` are equal on all members."""
        squeezed, owned = self.squeezed, self.squeezed.owned
        about = [self.digest, repr(self.weight), str(int(squeezed.alone)), *self.contributors]
        return {
            f"shared.{_PENDING}mean": squeezed.mean,
            f"shared.{_PENDING}about": torch.tensor(list(" ".join(about).encode())),
            f"own.{_PENDING}sent": squeezed.sent,
            f"own.{_PENDING}left": squeezed.left,
            f"own.{_PENDING}owned": torch.tensor([owned.start, owned.stop]),
            f"own.{_PENDING}moved": self.moved,
        }

    @classmethod
    def load(cls, state: Mapping[str, Tensor], *, buffers: int) -> Self | None:
        """Return the result stored in a state, or None.

        A member without its own part applies the common change as if it had sent exactly that.
        """
        about = state.get(f"shared.{_PENDING}about")
        if about is None:
            return None
        digest, weight, alone, *names = bytes(about.tolist()).decode().split(" ")
        mean = state[f"shared.{_PENDING}mean"].clone()
        start, stop = state.get(f"own.{_PENDING}owned", torch.zeros(2)).long().tolist()
        squeezed = CompressedMean(
            mean, state.get(f"own.{_PENDING}sent", mean).clone(), slice(start, stop),
            state.get(f"own.{_PENDING}left", mean[:0]).clone(), alone=alone == "1",
        )  # fmt: skip
        moved = state.get(f"own.{_PENDING}moved", torch.zeros(buffers)).clone()
        return cls(squeezed, moved, tuple(names), float(weight), digest)


@dataclass(slots=True)
class DelayedRound:
    """A running compressed round, or a loaded result that waits to be applied."""

    positions: Tensor
    buffers: Tensor
    """At its start, like `positions`."""
    prepare_s: float = 0.0
    work: Work[CommittedRound[Found]] | None = None
    loaded: CompressedResult | None = None

    def pending(self) -> dict[str, Tensor]:
        """Return the result once it is known; empty if the round failed."""
        if self.work is None:
            return {} if self.loaded is None else self.loaded.state()
        try:
            return CompressedResult.of(self.work.wait().reduced, self.buffers).state()
        except AtollError:
            return {}  # applying the result raises the error

    def end(self) -> None:
        """Wait for the end of a running round, and ignore its result."""
        self.pending()
