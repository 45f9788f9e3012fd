"""A member's duties in the verification of its job: a thread that asks the hub and does them.

It hands over the member's own states, and computes steps again: those of others as their checker or
judge, its own if they are disputed.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from atoll.config import WorkerEnvironment
from atoll.errors import AtollError
from atoll.net.endpoint import endpoint_of
from atoll.net.http.client import HubClient
from atoll.net.sync_link import SyncLink
from atoll.train.verification.child import BEFORE, HANDED, OPENING, TASK
from atoll.train.verification.recomputer import Recomputer
from atoll.train.verification.witness import Witness
from atoll.verification.challenge import Stage
from atoll.wire.messages import (
    Done,
    VerificationAsk,
    VerificationTask,
    VerificationWork,
)

log = logging.getLogger(__name__)

ASK_S = 2.0
"""Seconds between two questions, unless a period begins."""
SOON_S = 0.2
"""Least seconds between two questions."""
ANSWER_S = 60.0
"""Longest wait for an answer of the hub."""
NICENESS = 10
"""Of a process that computes steps of others: training goes first."""


class VerificationDuty:
    """Does one member's tasks until it is closed."""

    def __init__(
        self,
        link: SyncLink,
        environment: WorkerEnvironment,
        *,
        num_slots: int,
        witness: Callable[[], Witness | None],
    ) -> None:
        """Start the thread; `witness` returns the member's present one."""
        self._link, self._environment, self._num_slots = link, environment, num_slots
        self._witness = witness
        self._stop, self._opened = threading.Event(), threading.Event()
        # A member that is slow to name its own digests gets a strike: nothing may delay that.
        self._defence = self._lane("defence", niceness=0)
        self._checks = self._lane("checks", niceness=NICENESS)
        self._thread = threading.Thread(target=self._run, name="verification", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; what it computes is abandoned."""
        self._stop.set()
        self._opened.set()
        for lane in (self._defence, self._checks):
            lane.close()
        self._thread.join(ANSWER_S)

    def _lane(self, name: str, *, niceness: int) -> Recomputer:
        command = [
            # -P: no file of the job takes the place of a module of ours.
            sys.executable, "-P", "-m", "atoll.train.verification.child",
            str(self._environment.spec), str(self._num_slots), str(niceness),
        ]  # fmt: skip
        return Recomputer(name, command, do=self._compute)

    def _run(self) -> None:
        while not self._stop.wait(SOON_S):
            witness = self._witness()
            opened = self._opened if witness is None or witness.opened is None else witness.opened
            opened.wait(ASK_S)
            opened.clear()
            if self._stop.is_set() or self._link.failed is not None:
                return
            try:
                self._once()
            except AtollError as error:
                log.info("verification: %s", error)
            except Exception:
                log.exception("verification")

    def _once(self) -> None:
        """Ask for tasks, and do them."""
        witness = self._witness()
        busy = [task.challenge for task in (self._defence.task, self._checks.task) if task]
        work = self._link.request(VerificationAsk(busy), timeout_s=ANSWER_S)
        if not isinstance(work, VerificationWork):
            return
        own = self._environment.member
        deposits = [t for t in work.tasks if t.kind == Stage.DEPOSIT and t.member == own]
        for task in deposits:
            self._deposit(task, witness)
        if witness is not None:
            witness.release(work.drawn, needed=())
        todo = [task for task in work.tasks if task.kind != Stage.DEPOSIT]
        for lane, mine in ((self._defence, True), (self._checks, False)):
            tasks = [task for task in todo if (task.member == own) == mine]
            lane.keep(tasks)
            if tasks:
                lane.give(tasks[0])

    def _deposit(self, task: VerificationTask, witness: Witness | None) -> None:
        """Hand over the state with which the steps of a round began."""
        kept = witness.kept(task.round) if witness is not None else None
        if kept is None:
            log.warning("the state of round %d is not kept any more", task.round)
            return
        with self._folder() as folder, self._client() as client:
            kept.write(Path(folder) / OPENING)
            self._hand_over(client, task, 0, Path(folder) / OPENING)

    def _compute(self, lane: Recomputer, task: VerificationTask) -> None:
        """Compute steps of a round again, and tell the hub what they gave."""
        job = self._environment.job
        with self._folder() as name, self._client() as client:
            folder = Path(name)
            (folder / TASK).write_bytes(msgspec.json.encode(task))
            client.get_state(job, task.challenge, 0, folder / OPENING)
            if task.kind == Stage.JUDGE and task.first > 0:
                client.get_state(job, task.challenge, task.first, folder / BEFORE)
            answer = lane.answer(task, folder)
            if answer is None:
                return
            if task.kind == Stage.STATE and not answer.failed:
                self._hand_over(client, task, task.last, folder / HANDED)
                return
            reply = self._link.request(answer, timeout_s=ANSWER_S)
            if not isinstance(reply, Done):
                log.warning("an answer of the verification was not taken: %s", reply)

    def _hand_over(
        self, client: HubClient, task: VerificationTask, position: int, path: Path
    ) -> None:
        client.put_state(self._environment.job, task.challenge, position, path)

    def _folder(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix="verification-", dir=self._environment.directory)

    def _client(self) -> HubClient:
        environment = self._environment
        return HubClient(environment.hub, environment.token, endpoint=endpoint_of(environment))
