"""Run jobs on this machine alone: an embedded hub and nodes, from start to clean end.

`LocalOutput` reads what the processes of an embedded run print, without its hub.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from atoll.cli.jobs import batch, results
from atoll.cli.jobs.embedded import (
    Embedded,
    Interrupted,
    Ready,
    is_in_use,
    remember_embedded,
)
from atoll.cli.jobs.follow import failure, follow, say_ended, show_failure
from atoll.cli.jobs.interrupts import Interrupts
from atoll.cli.jobs.jobfile import Submission
from atoll.cli.jobs.precheck import check_can_train
from atoll.cli.jobs.submit import find_secrets, send_batch
from atoll.cli.picture import Picture
from atoll.cli.views import screen
from atoll.cli.views.job import ENDED, Watched
from atoll.cli.views.live import SILENT, View
from atoll.errors import AtollError, DeadlineExceeded, HubUnreachable
from atoll.ids import new_suffix
from atoll.net.http.client import HubClient
from atoll.wire.states import JobState

STOP_GRACE_S = 1.7
"""After Ctrl+C: time for members to finish their round, save and leave."""

KILL_AFTER_S = 3.5
"""After Ctrl+C: time until remaining processes are killed; five seconds in all."""


AWAY_S = 30.0
"""How long the embedded hub may be unreachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """What to run here."""

    folder: Path
    """State of the embedded hub and nodes."""
    jobs: Path
    """`runs/`."""
    nodes: int
    submissions: Sequence[Submission] = ()
    """New jobs, unless `resume` is given."""
    resume: str = ""
    """A job of an earlier embedded run."""
    changed: str = ""
    """The job file with which it resumes, if changed."""
    checkpoint: int | None = None
    """Round of the checkpoint that it resumes from; -1: none; None: the newest undamaged one."""
    parameters: int = 0
    """Of the model, if known; for the comparison with data-parallel training."""
    picture: Picture | None = None
    """Where to save a picture of the terminal."""


def new_folder(jobs: Path) -> Path:
    """Return a folder for a new embedded hub."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return jobs / ".embedded" / f"{stamp}-{new_suffix()}"


def run_local(plan: LocalRun, *, console: Console) -> int:
    """Run a job to its end or to Ctrl+C; return the exit status of the command."""
    check_can_train()
    find_secrets(plan.submissions)  # a missing one is reported before anything starts
    outcome = _Outcome()
    with contextlib.ExitStack() as stack:
        embedded = Embedded(
            folder=plan.folder.resolve(), jobs=plan.jobs.resolve(), nodes=plan.nodes
        )
        watchdog = threading.Timer(KILL_AFTER_S, embedded.kill)
        watchdog.daemon = True
        stack.callback(watchdog.cancel)
        interrupts = stack.enter_context(Interrupts(on_first=watchdog.start))
        stack.callback(_close, embedded, interrupts)
        with contextlib.suppress(Interrupted):
            _conduct(plan, embedded, interrupts, console, outcome)
        interrupted = bool(interrupts)
    if interrupted:
        _say_interrupted(console, plan, outcome)
        return 130
    return _finish(plan, outcome, console)


@dataclass(slots=True)
class _Outcome:
    """State of the jobs after their processes have ended."""

    jobs: list[str] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)


def _conduct(
    plan: LocalRun,
    embedded: Embedded,
    interrupts: Interrupts,
    console: Console,
    outcome: _Outcome,
) -> None:
    """Start everything, submit or resume, follow, and stop the jobs on a signal."""
    note = "Ctrl+C stops and keeps the work"
    with View(console, dashboard="starting ...", note=note, picture=plan.picture) as view:
        plural = "s" if plan.nodes > 1 else ""
        view.say(f"starting a hub and {plan.nodes} node{plural} on this machine ...")
        ready = embedded.start(interrupts)
        view.dashboard = ready.dashboard
        if not console.is_terminal or len(plan.submissions) > 1:
            view.say(f"dashboard {ready.dashboard}")
        with ready.hub.client(timeout_s=5.0) as client:
            outcome.jobs = _enter(plan, client)
            for job in outcome.jobs:
                remember_embedded(plan.jobs / job, folder=plan.folder, nodes=plan.nodes)
            if len(outcome.jobs) > 1:
                view.close()
                outcome.watched = batch.follow_batch(
                    client, outcome.jobs, console=console, interrupts=interrupts,
                    check=embedded.check, away_s=AWAY_S,
                )  # fmt: skip
            else:
                outcome.watched = [_follow(plan, client, embedded, interrupts, view, outcome)]
            if interrupts:
                view.say("stopping: members finish their round, save and leave ...")
                _stop(ready, outcome, interrupts)
                return
            view.close()
            if len(outcome.jobs) > 1:
                batch.say_how_they_ended(client, outcome.watched, console=console)
            elif outcome.watched[0].state == JobState.FAILED:
                failed = outcome.watched[0].view
                show_failure(screen.errors(), client, failed, echoed=_is_echoed(plan))


def _follow(
    plan: LocalRun,
    client: HubClient,
    embedded: Embedded,
    interrupts: Interrupts,
    view: View,
    outcome: _Outcome,
) -> Watched:
    """Follow a single job."""
    return follow(
        client,
        Watched(outcome.jobs[0], parameters=plan.parameters),
        view=view,
        interrupts=interrupts,
        check=embedded.check,
        away_s=AWAY_S,
        echo=_is_echoed(plan),
    )


def _is_echoed(plan: LocalRun) -> bool:
    """Return whether the output of the members is printed while they run."""
    return bool(plan.submissions and plan.submissions[0].spec.kind not in SILENT)


def _enter(plan: LocalRun, client: HubClient) -> list[str]:
    """Submit the new jobs or resume the old one; return their ids."""
    if plan.submissions:
        for name, value in find_secrets(plan.submissions).items():
            client.set_secret(name, value)
        return send_batch(client, list(plan.submissions), batch=batch.label(plan.folder))
    return [client.resume(plan.resume, spec=plan.changed, checkpoint=plan.checkpoint)]


def _stop(ready: Ready, outcome: _Outcome, interrupts: Interrupts) -> None:
    """Ask the members to stop and wait briefly; errors are ignored."""
    deadline = time.monotonic() + STOP_GRACE_S + 0.3
    with (
        contextlib.suppress(AtollError),
        ready.hub.client(timeout_s=1.0) as client,
    ):
        for one in outcome.watched:
            if not one.ended:
                with contextlib.suppress(AtollError):  # late on a busy machine, but on its way
                    client.stop(one.job, grace_s=STOP_GRACE_S)
        while time.monotonic() < deadline and interrupts.count < 2:
            with contextlib.suppress(HubUnreachable, DeadlineExceeded):
                for one in outcome.watched:
                    one.view = client.job(one.job)
                if all(one.ended for one in outcome.watched):
                    return
            time.sleep(0.1)


def _close(embedded: Embedded, interrupts: Interrupts) -> None:
    """End every child; quickly after Ctrl+C."""
    embedded.close(patience_s=0.6 if interrupts else 3.0)


def _say_interrupted(console: Console, plan: LocalRun, outcome: _Outcome) -> None:
    if not outcome.jobs:
        console.print("[yellow]stopped[/] before the job was submitted; nothing is left running")
        return
    policies = {one.job for one in outcome.watched if one.view.get("kind") == "rl"}
    for job in outcome.jobs:
        folder = plan.jobs / job
        saved = results.newest_checkpoint(folder)
        kept = f"kept: {escape(screen.shown(saved))}" if saved else "no checkpoint was complete yet"
        if job in policies and saved is None:
            kept = "kept: the state of each policy and of the critic"
        console.print(f"[yellow]stopped[/]  {kept}", soft_wrap=True)
        console.print(f"resume with   atoll resume {escape(screen.shown(folder))}", soft_wrap=True)


def _finish(plan: LocalRun, outcome: _Outcome, console: Console) -> int:
    """Show the results of ended jobs; return the exit status."""
    if len(outcome.jobs) > 1:
        return batch.finish_batch(outcome.watched, folder=plan.jobs, console=console)
    view = outcome.watched[0].view
    if view["state"] == JobState.FAILED:
        if results.came_to_something(view):
            results.finish(plan.jobs / outcome.jobs[0], view=view, console=console)
        raise failure(view)
    say_ended(console, view)
    if view["state"] == JobState.DONE:
        folder = plan.jobs / outcome.jobs[0]
        results.finish(folder, view=view, console=console)
        if plan.picture is not None:
            plan.picture.save(
                "atoll", lambda still: results.finish(folder, view=view, console=still)
            )
    return 0


_STATES = frozenset(JobState)


class LocalOutput:
    """Reads the new output of one job of an embedded hub."""

    def __init__(self, folder: Path, *, job_folder: Path) -> None:
        """Start at the beginning.

        Args:
            folder: Of the embedded hub and its nodes.
            job_folder: The job's own folder.
        """
        self._folder = folder
        self._job_folder = job_folder
        self._pattern = f"node*/jobs/{job_folder.name}/*/output.log"
        self._read: dict[Path, int] = {}
        self.nodes: dict[str, str] = {}
        """The node of each member whose output was read."""

    def lines(self, *, last: bool = False) -> list[dict[str, Any]]:
        """Return the lines since the last call; with `last` also an unfinished one."""
        found: list[dict[str, Any]] = []
        for path in sorted(self._folder.glob(self._pattern)):
            with path.open("rb") as file:
                start = self._read.get(path, 0)
                if path.stat().st_size < start:  # the file was rotated
                    start = 0
                file.seek(start)
                block = file.read()
            whole, newline, _ = block.rpartition(b"\n")
            if last and not block.endswith(b"\n"):
                whole, newline = block, b""
            self._read[path] = start + len(whole) + len(newline)
            if whole or newline:
                text = whole.decode("utf-8", "replace")
                member = path.parent.name
                self.nodes[member] = path.relative_to(self._folder).parts[0]
                found += [{"member": member, "text": line} for line in text.split("\n")]
        return found

    def ended(self) -> bool:
        """Return whether the output is complete: the job is over, or its hub is gone."""
        return self._state() in ENDED or not self._hub_runs()

    def _state(self) -> str:
        """Return the job's state from its events."""
        try:
            lines = (self._job_folder / "events.jsonl").read_text("utf-8").splitlines()
        except OSError:
            return ""
        for line in reversed(lines):
            try:
                kind = str(json.loads(line).get("kind"))
            except ValueError:  # a line that is being written
                continue
            if kind in _STATES:
                return kind
        return ""

    def _hub_runs(self) -> bool:
        """Return whether a process holds the lock of the hub's database."""
        return is_in_use(self._folder / "hub")
