"""A job whose members are threads: rounds, recovery and checkpoints are real."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.checkpoint import DirectoryStore, Saved, SavePoint
from atoll.checkpoint.format.memory_image import MemoryImage, part_of
from atoll.checkpoint.format.part import Part
from atoll.config import CheckpointTable
from atoll.group.base import Group, Work
from atoll.group.in_process.group import MemoryGroup
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.ids import member_id, slot_of
from atoll.recovery import Recovered
from atoll.run import Run
from atoll.run.place import Membership
from atoll.train.state.committed import CommittedState
from atoll.train.state.recovery_client import RecoveryClient
from tests.patience import PATIENCE_S

SEED = 7


class Killed(Exception):
    """A process was killed: nothing of its loop runs any more."""


@dataclass
class Ended:
    """What a loop returns."""

    model: nn.Module
    """All of it is to be equal on all members."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Objects with a `state_dict` that each member has for itself."""


class Diary:
    """What a loop has done; loops call `step` after each optimizer step."""

    def __init__(
        self, run: Any, method: Any, *, note: Callable[[int], None] = lambda step: None
    ) -> None:
        """Train by `method`; `note` is called with the group's step after each."""
        self.run, self.method, self._note = run, method, note
        self.samples: list[list[int]] = []
        """Of each step."""
        self.rates: list[float] = []
        self.first = 0
        """Steps of the group before the first one of this life."""

    def step(self, samples: Any, rate: Any) -> None:
        """Write down a step's samples and its learning rate."""
        if not self.samples:
            self.first = self.run.step - 1
        self.samples.append([int(sample) for sample in samples])
        self.rates.append(float(rate))
        self._note(self.run.step)

    @property
    def trained(self) -> list[int]:
        return [sample for step in self.samples for sample in step]


Loop = Callable[[Any, Diary], Ended]


@dataclass(frozen=True)
class Life:
    """One process of one member: what it did, and what it ended with unless it was killed."""

    diary: Diary
    ended: Ended | None = None

    @property
    def first(self) -> int:
        return self.diary.first

    @property
    def end(self) -> int:
        """Steps of the group when it ended."""
        return self.first + len(self.diary.samples)

    @property
    def state(self) -> dict[str, str]:
        assert self.ended is not None
        return hashes(self.ended.model.state_dict())

    @property
    def own(self) -> dict[str, dict[str, str]]:
        assert self.ended is not None
        return {name: hashes(thing.state_dict()) for name, thing in self.ended.own.items()}


def hashes(state: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of every entry of a state, with its type and shape."""
    return {name: _hash(value) for name, value in state.items()}


def _hash(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    raw = value.detach().contiguous().reshape(-1)
    data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


class Bare:
    """Stands in for a run: the loop is plain PyTorch then, on all the data."""

    slot, num_slots, member, stopping = 0, 1, "w0", False
    device = torch.device("cpu")
    members = ("w0",)

    def __init__(self, folder: Path, *, seeded: bool = False) -> None:
        """With `seeded` the data come in the order of a job's; else as they are given."""
        self.directory, self._seeded = folder, seeded
        self.diary: Diary | None = None

    @property
    def step(self) -> int:
        return len(self.diary.samples) if self.diary is not None else 0

    def wrap(self, model: Any, optimizer: Any, **settings: Any) -> Any:
        return optimizer

    def shard(self, data: Any) -> Any:
        if not self._seeded:
            return data
        return Run(SingleGroup(), Membership(self.directory, SEED)).shard(data)

    def keep(self, name: str, thing: Any) -> None:
        pass

    def log(self, **values: Any) -> None:
        pass

    def finish(self) -> None:
        pass

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()


def train_bare(loop: Loop, folder: Path, *, seeded: bool = False) -> Life:
    """Return what the loop does without Atoll."""
    torch.manual_seed(SEED)
    run = Bare(folder, seeded=seeded)
    diary = run.diary = Diary(run, None)
    ended = loop(run, diary)
    diary.first = 0
    return Life(diary, ended)


class Job:
    """Members of one process; each may be killed and come back."""

    def __init__(
        self, folder: Path, members: int, *, method: Any, every: int = 0, resume: int = -1
    ) -> None:
        """Save each `every` rounds; go on from the checkpoint of round `resume`."""
        self.groups = MemoryGroups(
            members, timeout_s=PATIENCE_S, hold_s=PATIENCE_S, start_round=max(0, resume)
        )
        self.folder, self.members, self.method = folder, members, method
        self.store = DirectoryStore(folder / "checkpoints")
        self._every, self._resume = every, resume
        self._states: dict[str, tuple[CommittedState, Any]] = {}
        self._saving = threading.Lock()
        self.recovering = threading.Event()
        """A member has begun to recover: rounds wait for it from now on."""

    # ---------------------------------------------------------------------------- members

    def train(self, loop: Loop, *, kill_after: int = 0) -> list[Life]:
        """Train all members together, to the end or until all are killed after that step."""

        def body(group: Group) -> Life:
            def note(step: int) -> None:
                if kill_after and step >= kill_after:
                    self.groups.kill(group.me)
                    raise Killed(group.me)

            return self.live(loop, group, note=note)

        return self.groups.together(body, timeout_s=PATIENCE_S)

    def train_losing(self, loop: Loop, lost: str, *, after: int) -> tuple[list[Life], Life]:
        """Train; kill a member after a step and start it again while the others wait.

        Returns the lives that ended well, in slot order, and the one that was cut short.
        """
        gone = threading.Event()

        def body(group: Group) -> Life:
            def note(step: int) -> None:
                if step != after:
                    return
                if group.me == lost:
                    self.groups.kill(lost)
                    raise Killed(lost)
                assert self.recovering.wait(PATIENCE_S)

            try:
                return self.live(loop, group, note=note)
            finally:
                gone.set()  # not before: its last words would end the next process, too

        def again() -> Life:
            assert gone.wait(PATIENCE_S)
            try:
                return self.live(loop, self.groups.add(lost), late=True)
            finally:
                self.recovering.set()  # also if it failed: nothing is left to wait for

        back = Work.start(again, name="back")
        lives = self.groups.run(body, timeout_s=PATIENCE_S)
        again_life = back.wait(PATIENCE_S)
        first: list[Life] = []
        for life in lives:
            if isinstance(life, BaseException):
                raise life
            first.append(life)
        slot = slot_of(lost)
        return [*first[:slot], again_life, *first[slot + 1 :]], first[slot]

    def live(
        self,
        loop: Loop,
        group: Group,
        *,
        note: Callable[[int], None] = lambda step: None,
        late: bool = False,
    ) -> Life:
        """Run the loop as one process of a member, until it ends or is killed."""
        run = self._run(group, late=late)
        diary = Diary(run, self.method, note=note)
        try:
            with run:
                ended = loop(run, diary)
        except Killed:
            return Life(diary)
        return Life(diary, ended)

    def _run(self, group: Group, *, late: bool) -> Run:
        slot = slot_of(group.me)
        folder = self.folder / member_id(slot)
        folder.mkdir(parents=True, exist_ok=True)
        membership = Membership(folder, SEED, "job", slot=slot, num_slots=self.members)
        run = Run(group, membership, saving=CheckpointTable(every=self._every, every_s=0))
        registered = SimpleNamespace(
            resume_round=self._resume, recover=late, slot=slot, num_slots=self.members
        )
        run._enrolled = SimpleNamespace(  # type: ignore[assignment]
            late=late, replaced=False, store=lambda: _Open(self.store), saver=lambda: _AtOnce(self),
            recovery=self._recovery(group), leave=group.leave,
            connection=SimpleNamespace(registered=registered),
        )  # fmt: skip
        return run

    # ---------------------------------------------------------------------------- recovery

    def _recovery(self, group: Group) -> RecoveryClient:
        def fetch(
            *, ready: bool, distrusted: Sequence[str] = (), older: Recovered | None = None
        ) -> Recovered:
            assert isinstance(group, MemoryGroup)
            sources = group.recover(ready=ready)
            self.recovering.set()
            donors = [peer.member for peer in sources.peers if peer.member in self._states]
            if not donors:
                return Recovered(sources.round, "", None, None, [], 0.0, 0, sources)
            state, still = self._states[donors[0]]
            deadline = time.monotonic() + PATIENCE_S
            while state.round != sources.round:
                assert time.monotonic() < deadline, "the donor does not come to the round"
                time.sleep(0.002)
            with still(timeout_s=PATIENCE_S):
                shared, inner = (_sent(part) for part in state.parts())
                base = state.base
            return Recovered(sources.round, base, shared, inner, donors[:1], 0.0, 0, sources)

        def offer(state: CommittedState, *, still: Any) -> None:
            self._states[group.me] = (state, still)

        return RecoveryClient(
            group,
            fetch=fetch, server=SimpleNamespace(offer=offer), announce=lambda event: None,
        )  # fmt: skip

    def put(self, point: SavePoint, parts: Any) -> None:
        with self._saving:
            self.store.put(point, parts)


def _sent(part: Part) -> Part:
    """Return a part as it arrives elsewhere."""
    return part_of(bytearray(MemoryImage(part).view), part.name)


class _Open:
    """A store that its users may close."""

    def __init__(self, store: DirectoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        pass


class _AtOnce:
    """Writes checkpoints at once, where a job's own writer does so beside training."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def save(self, point: SavePoint, parts: Any, *, final: bool) -> Saved:
        self._job.put(point, parts)
        return Saved(0, 0.0)

    def close(self, *, timeout_s: float) -> None:
        pass
