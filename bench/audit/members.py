"""Members of a simulated verified run: honest ones, and those that cheat in one way each.

A member is the trainer's own parts in this process: model, optimizer, data, DiLoCo and the witness
that takes its digests. Only the network is left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.codec.base import Packet
from atoll.config import JobSpec
from atoll.group.single import SingleGroup
from atoll.ids import slot_of
from atoll.reducer.mean import Share
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.outer.base import OuterDefaults
from atoll.strategies.outer.periodic import KEY, PeriodicOuter
from atoll.strategies.vectors.flat import Flat, digest
from atoll.train.batches import MemberStream
from atoll.train.build import build
from atoll.train.computing import options_on
from atoll.train.verification.arithmetic import arithmetic
from atoll.train.verification.kept_state import KeptState
from atoll.train.verification.witness import Witness
from atoll.verification.trace import packet_digest, state_digest
from atoll.wire.messages import Commitment

CHEATS = ("copy", "skip", "stale", "flip", "data")
"""Copies another's contribution, does half of its steps, sends an old contribution again, sends the
negative, or trains on other data than its own (one batch again and again)."""


class _NoRounds(OuterDefaults):
    """Steps follow each other; the simulation holds the rounds."""


class TimedWitness(Witness):
    """Counts the seconds of the processor that its digests and copies take."""

    seconds = 0.0

    def _open(self) -> None:
        began = time.process_time()
        super()._open()
        self.seconds += time.process_time() - began

    def stepped(self) -> None:
        """Take a digest, if the step is marked."""
        began = time.process_time()
        super().stepped()
        self.seconds += time.process_time() - began

    def contributed(self, delta: Tensor) -> None:
        """Digest the contribution."""
        began = time.process_time()
        super().contributed(delta)
        self.seconds += time.process_time() - began


@dataclass(frozen=True, slots=True)
class Turn:
    """What one member brings to a round."""

    commitment: Commitment
    packet: Packet
    weight: float
    delta: Tensor
    given: tuple[int, dict[str, int]]
    """Slot and position that the member was given."""
    base: str
    train_s: float
    """Seconds of the processor for the steps, without digests."""

    @property
    def received(self) -> str:
        """Digest of what the reducer gets."""
        return packet_digest(self.packet.codec, self.weight, self.packet.data)


class SimulatedMember:
    """One member; `cheat` is one of `CHEATS`, `accuse`, `silent`, or empty."""

    def __init__(self, spec: JobSpec, name: str, *, num_slots: int) -> None:
        self.name, self.cheat = name, ""
        self.spec, self._num_slots = spec, num_slots
        device = torch.device("cpu")
        built = self.built = build(
            spec, member=name, slot=slot_of(name), num_slots=num_slots, device=device
        )
        options = options_on(spec, device)
        self._local = Local(language_model_loss, clip=options.clip, options=options)
        self._local.prepare(built.model)
        if not isinstance(built.outer, PeriodicOuter):
            raise TypeError(f"{built.strategy} has no rounds of this kind")
        self.task, self.outer = built.task, built.outer
        self.outer.setup(self.task, group=SingleGroup(me=name), codec=built.codec)
        self.flat = Flat.of(self.task)
        self._first = KeptState.of(self.task, self.flat)
        self._stub: Any = _NoRounds()
        self.reset()

    def reset(self) -> None:
        """Begin a run anew."""
        task = self.task
        self._first.load(task, self.flat)
        task.step = task.round = task.tokens = 0
        self.built.schedule.load_state_dict({"step": 0})
        self.outer.load_state_dict({"shared.start": self._first.model.clone()})
        self.outer.begin_at(task, self._first.model)
        task.begin_period(self.outer.next_due(0))
        self.stream = MemberStream(
            self.built.shards, slot=slot_of(self.name), batch=self.spec.train.batch
        )
        self.witness = task.witness = TimedWitness(
            task, self.stream, seed=self.spec.job.seed,
            arithmetic=arithmetic(self.built.dataset.digest),
        )  # fmt: skip
        self._reading = self.witness.reading()
        self._old: Tensor | None = None
        self._favourite: Any = None

    @property
    def cheating(self) -> bool:
        """Whether it cheats in its own work now."""
        return self.cheat in CHEATS

    def train(self) -> Turn:
        """Do the steps of a period, honestly or not; return what the member brings."""
        task, place = self.task, self.stream.place()
        began, digests_s = time.process_time(), self.witness.seconds
        if place is None:
            raise RuntimeError("a member without data")
        base = digest(self.flat.read())
        for done in range(task.period.planned):
            batch = next(self._reading)
            if self.cheating and self.cheat == "data":
                self._favourite = self._favourite or batch
                batch = self._favourite
            if self.cheating and self.cheat == "skip" and done % 2:
                task.advance()
                continue
            self._local.step(task, batch, self._stub)
        train_s = time.process_time() - began - (self.witness.seconds - digests_s)
        delta, weight, _ = self.outer.contribution(task)
        delta = delta.clone()
        if self.cheating:
            if self.cheat == "skip":
                delta, weight = delta * 2.0, 2.0 * weight
            elif self.cheat == "flip":
                delta = -delta
            elif self.cheat == "stale":
                self._old = delta if self._old is None else self._old
                delta = self._old
        self.witness.contributed(delta)
        commitment = self.witness.commitment()
        if commitment is None:
            raise RuntimeError("a member without commitment")
        return self._turn(commitment, delta, weight, place, base, train_s)

    def copied(self, own: Turn, other: Turn) -> Turn:
        """Return another member's work as this member's own."""
        mine, theirs = own.commitment, other.commitment
        copied = msgspec.structs.replace(
            mine, marks=theirs.marks, contribution=theirs.contribution, closing=theirs.closing
        )
        return self._turn(copied, other.delta, other.weight, own.given, own.base, own.train_s)

    def _turn(
        self, commitment: Commitment, delta: Tensor, weight: float,
        given: tuple[int, dict[str, int]], base: str, train_s: float,
    ) -> Turn:  # fmt: skip
        codec = self.built.codec
        codec.set_round(self.task.round)
        packet = codec.encode(delta, key=KEY)
        return Turn(commitment, packet, weight, delta, given, base, train_s)

    def take(self, mean: Tensor) -> None:
        """Apply a round's mean, as :class:`PeriodicOuter` does after the verdict."""
        outer, task = self.outer, self.task
        outer._apply(task, mean.clone(), alone=False)
        self.flat.write(outer._start)
        outer._settle(task)
        task.round += 1
        outer._plan(task)

    def share(self, turn: Turn) -> Share:
        """Return the contribution as the reducer gets it."""
        return Share(self.name, turn.packet, turn.weight)


def corrupted(commitment: Commitment) -> str:
    """Return a digest that no other member names."""
    return state_digest("made up", commitment.closing)


def names(count: int) -> list[str]:
    """Return the members' names."""
    return [f"w{i}" for i in range(count)]


def cheats_of(kind: str, count: int, *, of: Sequence[str], seed: int) -> Mapping[str, str]:
    """Return `count` members that cheat in a way, chosen by a seed."""
    order = torch.randperm(len(of), generator=torch.Generator().manual_seed(seed)).tolist()
    return {of[i]: kind for i in order[:count]}
