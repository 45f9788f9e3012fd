"""Run the jobs of a sweep, on this machine or on a hub; what has ended is not run again.

The folder of a sweep holds a folder per run, as `runs/` does, and `sweep.json`: which job each run
is. A run has ended when its `summary.json` is there. On a hub, interrupted sweeps go on in the
background, and the same command follows them again.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from atoll.cli.hub_access import KnownHub
from atoll.cli.jobs import batch, results
from atoll.cli.jobs.embedded import Embedded, Interrupted
from atoll.cli.jobs.follow import failure
from atoll.cli.jobs.interrupts import Interrupts
from atoll.cli.jobs.jobfile import Submission
from atoll.cli.jobs.local import AWAY_S, KILL_AFTER_S, STOP_GRACE_S, new_folder
from atoll.cli.jobs.precheck import check_can_train
from atoll.cli.jobs.submit import send
from atoll.cli.views import screen
from atoll.cli.views.job import Watched
from atoll.errors import AtollError, ConfigError
from atoll.net.http.client import HubClient
from atoll.scaling.sweep import Sweep, SweepRun
from atoll.wire.states import JobState

LEDGER = "sweep.json"
AGAIN = frozenset({JobState.FAILED, JobState.STOPPED})
"""States of a job on a hub after which its run is started anew."""


@dataclass
class Ledger:
    """Which job each run of a sweep is."""

    folder: Path
    hub: str = ""
    """URL of the hub that the jobs are on; empty: they were on this machine alone."""
    jobs: dict[str, str] = field(default_factory=dict)
    """Key of the run -> id of its job."""

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        """Return the ledger of a folder; an empty one if there is none.

        Raises:
            ConfigError: it is damaged.
        """
        path = folder / LEDGER
        if not path.exists():
            return cls(folder)
        try:
            found = json.loads(path.read_text("utf-8"))
            return cls(
                folder, str(found["hub"]), {str(k): str(v) for k, v in found["jobs"].items()}
            )
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(
                "the record of this sweep cannot be read", given=f"{path} ({error})",
                remedy="another folder (--out), or remove this file to run everything again",
            ) from error  # fmt: skip

    def write(self) -> None:
        """Write it, atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self.folder / f"{LEDGER}.part"
        text = json.dumps({"hub": self.hub, "jobs": self.jobs}, indent=1) + "\n"
        scratch.write_text(text, encoding="utf-8", newline="\n")
        scratch.replace(self.folder / LEDGER)

    def has_ended(self, run: SweepRun) -> bool:
        """Return whether a run's results are here, to its end."""
        job = self.jobs.get(run.key)
        if not job:
            return False
        try:
            summary = json.loads((self.folder / job / "summary.json").read_text("utf-8"))
        except (OSError, ValueError):
            return False
        return not summary.get("stopped") and summary.get("loss_final") is not None


def pending(sweep: Sweep, ledger: Ledger) -> list[SweepRun]:
    """Return the runs that have not ended yet."""
    return [run for run in sweep.runs if not ledger.has_ended(run)]


def run_here(sweep: Sweep, *, folder: Path, nodes: int, console: Console) -> int:
    """Run a sweep on this machine alone; return the exit status of the command.

    Args:
        sweep: Its runs.
        folder: Where results are.
        nodes: How many members run side by side.
        console: Where progress is shown.

    Raises:
        ConfigError: a run has more members than there are nodes.
    """
    check_can_train()
    if sweep.most_members > nodes:
        raise ConfigError(
            "a run of this sweep has more members than there are nodes",
            given=f"members = {sweep.most_members}, --local {nodes}",
            remedy=f"--local {sweep.most_members}",
        )
    ledger = Ledger.read(folder)
    todo = pending(sweep, ledger)
    if not todo:
        return _say_done(sweep, ledger, [], console)
    ledger.hub, watched = "", []
    with contextlib.ExitStack() as stack:
        state = new_folder(folder).resolve()
        embedded = Embedded(folder=state, jobs=folder.resolve(), nodes=nodes)
        watchdog = threading.Timer(KILL_AFTER_S, embedded.kill)
        watchdog.daemon = True
        stack.callback(watchdog.cancel)
        interrupts = stack.enter_context(Interrupts(on_first=watchdog.start))
        stack.callback(lambda: embedded.close(patience_s=0.6 if interrupts else 3.0))
        with contextlib.suppress(Interrupted):
            ready = embedded.start(interrupts)
            _say_begin(sweep, todo, console, where=f"{nodes} nodes here, {ready.dashboard}")
            with ready.hub.client(timeout_s=5.0) as client:
                _submit(client, todo, ledger, label=batch.label(folder))
                watched = batch.follow_batch(
                    client, [ledger.jobs[run.key] for run in todo], console=console,
                    interrupts=interrupts, check=embedded.check, away_s=AWAY_S,
                    on_end=_keeper(folder),
                )  # fmt: skip
                _stop(client, watched)
        interrupted = bool(interrupts)
    if interrupted:
        left = len(pending(sweep, ledger))
        console.print(f"[yellow]stopped[/]  {left} of {len(sweep.runs)} runs are left")
        console.print("the same command goes on with them", soft_wrap=True)
        return 130
    return _say_done(sweep, ledger, watched, console)


def run_on_hub(where: KnownHub, sweep: Sweep, *, folder: Path, console: Console) -> int:
    """Run a sweep on the nodes of a hub; return the exit status of the command."""
    ledger = Ledger.read(folder)
    todo = pending(sweep, ledger)
    if not todo:
        return _say_done(sweep, ledger, [], console)
    with where.client() as client, Interrupts() as interrupts:
        known = ledger.jobs if ledger.hub == where.url else {}
        going = {run.key for run in todo if _goes_on(client, known.get(run.key, ""))}
        ledger.hub = where.url
        _say_begin(sweep, todo, console, where=where.url)
        _submit(
            client, [run for run in todo if run.key not in going], ledger, label=batch.label(folder)
        )
        watched = batch.follow_batch(
            client, [ledger.jobs[run.key] for run in todo], console=console, interrupts=interrupts,
            on_end=_keeper(folder, client),
        )  # fmt: skip
        if not all(one.ended for one in watched):
            console.print("they continue in the background; the same command follows them again")
            return 130
    return _say_done(sweep, ledger, watched, console)


def _goes_on(client: HubClient, job: str) -> bool:
    """Return whether the hub has this job, and it has neither failed nor was stopped."""
    if not job:
        return False
    try:
        return client.job(job)["state"] not in AGAIN
    except AtollError:  # it was removed, or never arrived
        return False


def _submit(client: HubClient, runs: list[SweepRun], ledger: Ledger, *, label: str) -> None:
    """Submit runs, and record each at once: an interruption loses none."""
    for run in runs:
        ledger.jobs[run.key] = send(client, Submission(run.spec, {}), batch=label)
        ledger.write()


def _keeper(folder: Path, remote: HubClient | None = None) -> Callable[[Watched], None]:
    """Return what writes the results of a job that has ended."""

    def keep(one: Watched) -> None:
        if one.state != JobState.DONE:
            return
        if remote is not None:
            results.fetch(remote, one.job, folder / one.job)
        member_results: dict[str, Any] = {
            member["member"]: member["result"]
            for member in one.view["members"]
            if member.get("result")
        }
        if member_results:
            results.write(folder / one.job, view=one.view, results=member_results)

    return keep


def _stop(client: HubClient, watched: list[Watched]) -> None:
    for one in watched:
        if not one.ended:
            with contextlib.suppress(AtollError):
                client.stop(one.job, grace_s=STOP_GRACE_S)


def _say_begin(sweep: Sweep, todo: list[SweepRun], console: Console, *, where: str) -> None:
    done = len(sweep.runs) - len(todo)
    tokens = screen.count(sum(run.tokens for run in todo))
    console.print(
        f"{len(todo)} runs of {escape(sweep.name)}, {tokens} tokens"
        + f"; {done} have ended before" * bool(done)
        + f"; {escape(where)}",
        soft_wrap=True,
    )


def _say_done(sweep: Sweep, ledger: Ledger, watched: list[Watched], console: Console) -> int:
    """Say what failed and what to do next; return the exit status."""
    for one in watched:
        if one.state == JobState.FAILED:
            screen.show_error(failure(one.view))
    left = len(pending(sweep, ledger))
    total = len(sweep.runs)
    console.print(f"{total - left} of {total} runs have ended")
    if left:
        console.print("the same command runs the others again", soft_wrap=True)
        return 1
    where = escape(screen.shown(ledger.folder))
    console.print(f"fit them   atoll scaling fit {where}", soft_wrap=True)
    return 0
