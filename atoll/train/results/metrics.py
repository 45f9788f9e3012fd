"""What a member measures while it trains, and how it is recorded and sent to the hub."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Protocol

from atoll.clock import Clock
from atoll.net.outbox import SyncOutbox
from atoll.net.sync_link import SyncLink
from atoll.strategies.base import SyncResult
from atoll.train.results.summary import PROCESS_BEGAN
from atoll.wire.messages import Event, Metrics, Point

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
"""Seconds between two points of a member: enough for a live view."""


class Progress(Protocol):
    """Where a member is in its training; a `Task` fits."""

    member: str
    step: int
    round: int
    tokens: int


class Recorder:
    """Writes a member's points to its `metrics.jsonl` and passes them on."""

    def __init__(
        self,
        task: Progress,
        *,
        clock: Clock,
        path: Path | None = None,
        report: Callable[[Point], None] | None = None,
        announce: Callable[[Event], None] | None = None,
    ) -> None:
        """Append to `path`; `report` and `announce` MUST NOT block."""
        self._task, self._clock = task, clock
        self._report, self._announce = report, announce
        self.labels: Mapping[str, float] = {}
        """Values that every point gets."""
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", newline="\n", buffering=1)

    def point(self, values: Mapping[str, float]) -> None:
        """Record values with the current time; values that are not finite are left out."""
        values = {**self.labels, **values}
        finite = {name: float(v) for name, v in values.items() if math.isfinite(v)}
        task = self._task
        point = Point(time=self._clock.wall(), step=task.step, round=task.round, values=finite)
        if self._file is not None:
            self._write(self._file, point)
        if self._report is not None:
            self._report(point)

    def process_began(self, totals: Totals) -> None:
        """Record the totals that this process continues from, so that they are not counted twice.

        The summary adds what the earlier processes of the member did beyond them.
        """
        counts = totals.to_dict() | {"tokens": self._task.tokens}
        self.point({PROCESS_BEGAN: 1.0} | counts)

    def _write(self, file: IO[str], point: Point) -> None:
        line = {
            "time": point.time,
            "member": self._task.member,
            "step": point.step,
            "round": point.round,
            "values": point.values,
        }
        try:
            file.write(json.dumps(line) + "\n")
        except OSError as error:
            # A full disk must not end the run, so only this file stops.
            log.warning("metrics are no longer written to disk: %s", error)
            self._file = None

    def event(self, kind: str, text: str, **about: str) -> None:
        """Report an event for people."""
        log.info("%s: %s", kind, text)
        if self._announce is not None:
            self._announce(Event(kind=kind, text=text, fields=about))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(slots=True)
class Totals:
    """Seconds and bytes of a member's whole run, continued after a resume."""

    wall_s: float = 0.0
    """Training time, without start-up and evaluation."""
    compute_s: float = 0.0
    """Part of `wall_s`: batches, forward, backward and optimizer steps."""
    sync_s: float = 0.0
    """Part of `wall_s`: rounds, with waiting."""
    wait_s: float = 0.0
    """Part of `sync_s`: until all members have arrived, and until the round is committed."""
    send_s: float = 0.0
    """Part of `sync_s`: transfer of tensors."""
    checkpoint_s: float = 0.0
    """Part of `wall_s`: saving."""
    evaluation_s: float = 0.0
    """Not part of `wall_s`."""
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    aborted: float = 0.0
    """Attempts at rounds that were not committed."""
    recovery_s: float = 0.0
    """Part of `wall_s`: recovery of the committed state after being left behind."""
    samples_given: float = 0.0
    """Of the data from `run.shard` that a script trains on."""
    wasted_steps: float = 0.0
    """Optimizer steps that were lost because the group continued without this member."""

    def count(self, elapsed_s: float, sync: SyncResult | None, *, waited_s: float = 0.0) -> None:
        """Add `elapsed_s` of training, with the round in it if there was one.

        For `waited_s` of that time training waited for other members outside of rounds.
        """
        self.wall_s += elapsed_s
        self.sync_s += waited_s
        self.send_s += waited_s
        elapsed_s -= waited_s
        if sync is None:
            self.compute_s += elapsed_s
            return
        seconds = sync.seconds
        sync_s = sync.held_up_s
        self.sync_s += sync_s
        self.wait_s += seconds.get("join", 0.0) + seconds.get("commit", 0.0)
        self.send_s += seconds.get("reduce", 0.0)
        self.compute_s += max(0.0, elapsed_s - sync_s)
        self.aborted += sync.aborted

    def to_dict(self) -> dict[str, float]:
        """Return names and numbers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def load(self, numbers: Mapping[str, float | int | str]) -> None:
        """Continue from the result of `to_dict`."""
        for field in fields(self):
            setattr(self, field.name, float(numbers.get(field.name, 0.0)))


class Meter:
    """Averages steps into points, so that a step costs next to nothing."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._losses = 0
        self._loss = 0.0
        self._norms = 0
        self._norm = 0.0
        self._tokens = 0

    def add(self, tokens: int, *, loss: float | None = None, norm: float | None = None) -> None:
        """Count one step."""
        self._tokens += tokens
        if loss is not None:
            self._losses += 1
            self._loss += loss
        if norm is not None:
            self._norms += 1
            self._norm += norm

    def take(self, elapsed_s: float) -> dict[str, float]:
        """Return the means since the last call, and start again."""
        values: dict[str, float] = {}
        if self._losses:
            values["loss"] = self._loss / self._losses
        if self._norms:
            values["grad_norm"] = self._norm / self._norms
        if self._tokens and elapsed_s > 0:
            values["tokens_per_s"] = self._tokens / elapsed_s
        self._clear()
        return values


def metrics_outbox(link: SyncLink) -> SyncOutbox[Point]:
    """Return the outbox that sends a member's points to the hub."""
    return link.outbox(lambda seq, points: Metrics(link.incarnation, seq, points))
