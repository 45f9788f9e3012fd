"""What tests of the roles share: all members of a job as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.config import JobSpec, read_spec
from atoll.group.base import Group
from atoll.group.single import SingleGroup
from atoll.queues import InMemoryChannel, QueueRegistry
from atoll.rl.run import run_job
from atoll.run import Run
from atoll.run.place import Membership
from tests.patience import PATIENCE_S

BOUND_S = PATIENCE_S

SMALL = {
    "steps": 512, "environments": 2, "rollout": 32, "epochs": 2, "minibatches": 2,
    "critic_epochs": 2, "critic_minibatches": 2, "hidden": [8], "critic_hidden": [8],
    "record": False, "save_every": 2,
}  # fmt: skip


def spec_of(*policies: dict[str, Any], tables: dict[str, Any] | None = None, **rl: Any) -> JobSpec:
    """Return a small job; policies without an env live in CartPole."""
    some = policies or ({"name": "one"},)
    named = [{"env": "CartPole-v1", **policy} for policy in some]
    return read_spec({**(tables or {}), "rl": {**SMALL, **rl, "policies": named}})


@dataclass
class Members:
    """The members of a job on threads, with queues that outlive them."""

    spec: JobSpec
    folder: Path
    channel: InMemoryChannel = field(default_factory=InMemoryChannel)
    groups: Callable[[int], Group] = lambda slot: SingleGroup(me=f"w{slot}")
    stops: dict[int, threading.Event] = field(default_factory=dict)

    def run(self, slot: int) -> Run:
        """Return a member's part in the job."""
        leave_requested = self.stops.setdefault(slot, threading.Event())
        run = Run(
            self.groups(slot),
            Membership(
                self.folder, seed=self.spec.job.seed, slot=slot, num_slots=self.spec.job.nodes
            ),
            leave_requested=leave_requested,
        )
        run._queues = QueueRegistry(
            self.channel, prefix="job", reader=run.member, stopping=lambda: run.stopping
        )
        return run

    def start(self, slot: int) -> Part:
        """Let a member do its part in a thread."""
        return Part(self, slot)

    def together(self, slots: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Let members do their parts at once; return what each reported."""
        chosen = range(self.spec.job.nodes) if slots is None else slots
        return [part.result() for part in [self.start(slot) for slot in chosen]]


class Part:
    """One member at work."""

    def __init__(self, members: Members, slot: int) -> None:
        members.stops.pop(slot, None)
        self._run = members.run(slot)
        self._asked = members.stops[slot]
        self._error: BaseException | None = None
        self._spec = members.spec
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            with self._run:
                run_job(self._spec, self._run)
        except BaseException as error:  # the test sees it
            self._error = error

    def stop(self) -> None:
        """Ask it to leave."""
        self._asked.set()

    def result(self) -> dict[str, Any]:
        """Wait for its end, and return its results."""
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive(), "a member did not end in time"
        if self._error is not None:
            raise self._error
        found: dict[str, Any] = self._run.results["rl"]
        return found
