"""A hub, three agents and a job of three members, as processes of this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.kit.cluster import Cluster
from bench.recovery import with_atoll
from bench.recovery.notes import Traced, Watch
from bench.recovery.scenario import MEMBERS

SPEC = """
[job]
name = "recovery"
nodes = {{min = 1, max = {members}}}
route = "{route}"
script = "{script}"
args = ["{folder}", "{step_s}", "{every}"]
"""


class AtollSide:
    """See `bench.recovery.scenario.Side`."""

    def __init__(self, folder: Path, *, route: str, step_s: float, every: int) -> None:
        """Describe it; nothing runs before `start`."""
        self._notes = folder / "notes"
        self._notes.mkdir(parents=True, exist_ok=True)
        self._route, self._step_s, self._every = route, step_s, every
        self.cluster = Cluster(folder)
        self.watch = Watch(self._notes)
        self.job = ""

    def start(self) -> None:
        """Start everything and submit the job."""
        self.cluster.start_hub()
        for number in range(len(MEMBERS)):
            self.cluster.start_node(f"n{number}")
        self.cluster.wait_for_nodes(len(MEMBERS))
        script = Path(with_atoll.__file__)
        spec = SPEC.format(
            members=len(MEMBERS), route=self._route, script=script.name, folder=self._notes,
            step_s=self._step_s, every=self._every,
        )  # fmt: skip
        files = {script.name: script.read_text(encoding="utf-8")}
        self.job = self.cluster.client.submit(spec, files=files)

    def restart(self, member: str) -> None:
        """Do nothing: the hub starts lost members again by itself."""

    def kill(self, traced: Traced) -> None:
        """`kill -9` a worker."""
        os.kill(traced.pid, signal.SIGKILL)

    def freeze(self, traced: Traced) -> None:
        """SIGSTOP a worker."""
        os.kill(traced.pid, signal.SIGSTOP)

    def thaw(self, traced: Traced) -> None:
        """SIGCONT a worker."""
        os.kill(traced.pid, signal.SIGCONT)

    def events(self) -> list[dict[str, Any]]:
        """Return the job's events, as the hub reports them."""
        return self.cluster.lines(self.job, "events.jsonl")

    def __enter__(self) -> Self:
        """End everything at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cluster.close()
