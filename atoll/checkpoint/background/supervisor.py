"""Supervise the writer process: send it orders, and restart it until every one is written."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from atoll.checkpoint.background.messages import (
    Copied,
    CopyFailed,
    Delivered,
    Failed,
    FolderTarget,
    HubTarget,
    Report,
    WriteOrder,
    WriterIdle,
    WriterSetup,
    Written,
)
from atoll.checkpoint.background.writer_process import WriterProcess
from atoll.checkpoint.files import Moment
from atoll.errors import (
    AtollError,
    CheckpointCorrupt,
    CheckpointError,
    DeadlineExceeded,
    HubUnreachable,
    from_dict,
)
from atoll.net.retry import backoff
from atoll.wire.messages import CheckpointPart, Event

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""In a row, without a checkpoint written; then the newest order is dropped."""

FIRST_PAUSE_S = 0.05
"""Pause before the first restart; it doubles with each further one."""

LONGEST_PAUSE_S = 30.0

Publish = Callable[[CheckpointPart], bool]


@dataclass(slots=True)
class _Task:
    """An unfinished order."""

    order: WriteOrder
    slot: int
    resent: bool = False
    """The hub did not find a delivered part, so it is sent again."""


class Supervisor:
    """A thread that starts the writer, sends it orders and handles its reports.

    The writer is started in this thread and dies with it, so the thread lives until `close`.
    """

    def __init__(
        self,
        setup: WriterSetup,
        *,
        inherited: Sequence[int],
        publish: Publish | None,
        on_event: Callable[[Event], None] | None,
        command: Sequence[str],
        moment: Moment,
    ) -> None:
        """Start thread and writer; see `BackgroundSaver` for the arguments."""
        self._setup, self._inherited, self._command = setup, list(inherited), command
        self._publish, self._on_event, self._moment = publish, on_event, moment
        self._numbers = itertools.count(1)
        self._news: queue.Queue[tuple[int, WriteOrder | Report | None]] = queue.Queue()
        self._changed = threading.Condition()
        self._tasks: dict[int, _Task] = {}
        self._copying = isinstance(setup.target, FolderTarget) and bool(setup.target.to)
        self._copies_requested = self._copying
        self._copy_trouble = ""
        self._closing = threading.Event()
        self._writer: WriterProcess | None = None
        self._life = 0
        self._restarts = 0
        self.lost = False
        """Whether the newest order failed."""
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------- from the training thread

    def free_slot(self, *, wait_s: float, urgent: bool) -> int | None:
        """Return an image that may be overwritten, or None.

        Args:
            wait_s: How long to wait for one.
            urgent: Also use the second image while the first is being written.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not self._closing.is_set():
                used = {task.slot for task in self._tasks.values()}
                if not used:
                    return 0
                free = {0, 1} - used
                if urgent and free:
                    return free.pop()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
        return None

    def take(self, order: WriteOrder, *, slot: int) -> None:
        """Have an image written; it must not change until then. The order gets a number."""
        with self._changed:
            order = msgspec.structs.replace(order, number=next(self._numbers))
            self._tasks[order.number] = _Task(order, slot)
            self.lost = False
        self._news.put((self._life, order))

    def wait(self, timeout_s: float) -> bool:
        """Wait until no order is under way; return whether the newest one succeeded."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._tasks or self._copying:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._closing.is_set():
                    break
                self._changed.wait(left_s)
            return not self._tasks and not self.lost

    def close(self) -> None:
        """End the writer and the thread."""
        if not self._closing.is_set():
            self._closing.set()
            self._news.put((0, None))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)
        with self._changed:
            self._changed.notify_all()

    def tell(self, kind: str, text: str, *, round_: int) -> None:
        """Report an event for people."""
        logger.warning("%s", text)
        if self._on_event is not None:
            try:
                self._on_event(Event(kind, text, {"round": str(round_)}))
            except AtollError as error:
                logger.warning("the report could not be sent: %s", error)

    @property
    def writer_pid(self) -> int:
        """Process id of the writer; 0 while there is none."""
        writer = self._writer
        return writer.pid if writer is not None else 0

    # ------------------------------------------------------------------ the thread itself

    def _run(self) -> None:
        try:
            self._start()
            while not self._closing.is_set():
                life, news = self._news.get()
                if isinstance(news, WriteOrder):
                    self._send(news)
                elif life == self._life and not self._closing.is_set():
                    self._hear(news)
        finally:
            if self._writer is not None:
                self._writer.end()
            self._writer = None

    def _start(self) -> None:
        """Start a writer; one that cannot be started counts as one that died."""
        self._life += 1
        life = self._life
        try:
            self._writer = WriterProcess(
                self._setup,
                inherited=self._inherited,
                on_report=lambda report: self._news.put((life, report)),
                on_end=lambda: self._news.put((life, None)),
                command=self._command,
            )
        except OSError as error:
            logger.warning("the writer of checkpoints cannot be started: %s", error)
            self._writer = None
            self._news.put((life, None))

    def _send(self, order: WriteOrder) -> None:
        if self._writer is not None and order.number in self._tasks:
            self._writer.send(order)
            self._moment("order sent")

    def _repeat(self, number: int, *, resent: bool = False) -> None:
        """Send an order again under a new number; reports about the old number are ignored.

        Otherwise the end of one would free the image while the other still reads it.
        """
        with self._changed:
            task = self._tasks.pop(number)
            order = msgspec.structs.replace(task.order, number=next(self._numbers))
            self._tasks[order.number] = _Task(order, task.slot, resent)
        self._send(order)

    def _hear(self, report: Report | None) -> None:
        """Handle a report."""
        if report is None:
            self._replace()
        elif isinstance(report, Delivered):
            self._announce(report)
        elif isinstance(report, Written):
            self._moment("written")
            self._restarts = 0
            with self._changed:
                self._copying = self._copying or (report.published and self._copies_requested)
            self._finish(report.number)
        elif isinstance(report, Failed):
            error = from_dict(report.error)
            self._finish(report.number, error=None if report.superseded else error)
        elif isinstance(report, WriterIdle):
            with self._changed:
                self._copying = False
                self._changed.notify_all()
        elif isinstance(report, Copied | CopyFailed):
            self._tell_copy(report)

    def _finish(self, number: int, *, error: AtollError | None = None) -> None:
        """Finish an order, successfully or with an error."""
        with self._changed:
            task = self._tasks.pop(number, None)
            if task is not None and error is not None and not self._tasks:
                self.lost = True
            self._changed.notify_all()
        if task is not None and error is not None:
            round_ = task.order.round
            text = f"the checkpoint of round {round_} was not saved: {error}"
            self.tell("checkpoint-failed", text, round_=round_)

    def _replace(self) -> None:
        """Restart the writer after its death and send it the newest order again."""
        if self._writer is not None:
            self._writer.end()
            self._writer = None
        self._restarts += 1
        with self._changed:  # the training thread may add an order
            rounds = {number: task.order.round for number, task in self._tasks.items()}
        # An order that was sent again has a higher number than a newer one.
        newest = max(rounds, key=lambda number: (rounds[number], number), default=0)
        for number in rounds.keys() - {newest}:
            self._finish(number)
        if self._restarts > MAX_RESTARTS and newest:
            error = CheckpointError(
                "the writer of checkpoints failed repeatedly",
                given=f"{self._restarts} times in a row",
                remedy="see this member's log; training continues without this checkpoint",
            )
            self._finish(newest, error=error)
        round_ = self._tasks[newest].order.round if newest in self._tasks else -1
        if self._restarts <= MAX_RESTARTS:
            text = f"the writer of checkpoints ended and is started again ({self._restarts})"
            self.tell("checkpoint-writer-restarted", text, round_=round_)
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._restarts - 1, 16), LONGEST_PAUSE_S)
        if not self._closing.wait(pause_s):
            self._start()
            if newest in self._tasks:
                self._repeat(newest)

    def _tell_copy(self, report: Copied | CopyFailed) -> None:
        """Report a copy; repeated errors are reported once."""
        if isinstance(report, Copied):
            self._copy_trouble = ""
            text = f"the checkpoint of round {report.round} is copied ({report.nbytes} bytes)"
            self.tell("checkpoint-copied", text, round_=report.round)
            return
        error = str(from_dict(report.error))
        if error != self._copy_trouble:
            self._copy_trouble = error
            text = f"the checkpoint of round {report.round} is not copied yet: {error}"
            self.tell("checkpoint-copy-failed", text, round_=report.round)

    # ------------------------------------------------------------------- announcements

    def _announce(self, delivered: Delivered) -> None:
        """Announce a delivered part to the hub; idempotent."""
        task = self._tasks.get(delivered.number)
        if task is None or self._publish is None:
            return
        order = task.order
        part = CheckpointPart(
            order.round, order.step, delivered.name, delivered.sha256, delivered.nbytes
        )
        self._moment(f"{delivered.name} delivered")
        try:
            self._announce_patiently(part, number=delivered.number)
        except CheckpointCorrupt as error:  # e.g. the hub lost it with an older disk
            if task.resent:
                self._finish(delivered.number, error=error)
            else:
                self._repeat(delivered.number, resent=True)
        except AtollError as error:
            self._finish(delivered.number, error=error)
        self._moment(f"{delivered.name} announced")

    def _announce_patiently(self, part: CheckpointPart, *, number: int) -> None:
        assert self._publish is not None
        target = self._setup.target
        deadline = time.monotonic() + (target.retry_s if isinstance(target, HubTarget) else 0.0)
        for pause_s in backoff():
            try:
                self._publish(part)
                return
            except (HubUnreachable, DeadlineExceeded):
                newer = max(self._tasks, default=number) > number
                if newer or time.monotonic() > deadline or self._closing.wait(pause_s):
                    raise
