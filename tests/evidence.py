"""What a cluster says when its test has failed: where processes wait, its events and its log."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import psutil

from atoll.cli.hub_access import find
from atoll.errors import AtollError
from atoll.net.http.client import HubClient
from tests.e2e.conftest import Atoll

SAY_S = 3.0
"""How long processes that are to show where they are have for it."""
EVENTS, ROUNDS, LINES = 60, 10, 400


def of(atoll: Atoll) -> str:
    """Return it as text; ends the processes, which show their stacks in what they print.

    Events are read before that: the ends of these processes are none of the failure's.
    """
    return "\n".join(_lines(atoll))


def _lines(atoll: Atoll) -> Iterator[str]:
    for process in atoll.processes():
        with contextlib.suppress(psutil.Error):
            yield f"{process.pid} {process.status()} {' '.join(process.cmdline())[-160:]}"
    try:
        with find(home=atoll.home).client() as client:
            jobs = [str(job["job"]) for job in client.jobs()]
            for job in jobs:
                yield from _of_job(client, job)
            yield "-- the log; stacks come last: the tests now end the processes with SIGABRT"
            _abort(atoll)
            for job in jobs:
                for line in client.logs(job, tail=LINES)["lines"]:
                    yield f"{line.get('member', '')} {line.get('text', line)}"
    except (AtollError, OSError) as error:
        yield f"the hub says no more: {error}"


def _abort(atoll: Atoll) -> None:
    for process in atoll.workers():
        with contextlib.suppress(psutil.Error):
            if "torch" in str(process.memory_maps()):  # the supervisor of an island would end it
                process.send_signal(signal.SIGABRT)  # faulthandler writes all stacks
    time.sleep(SAY_S)


def _of_job(client: HubClient, job: str) -> Iterator[str]:
    yield f"-- {job}: {client.job(job)}"
    for event in client.events(job)["events"][-EVENTS:]:
        yield f"{event['time']:.1f} {event['kind']} {event.get('member', '')} {event['text'][:300]}"
    for row in client.rounds(job)["rounds"][-ROUNDS:]:
        kept = ("epoch", "round", "route", "members", "contributors", "committed", "reason", "time")
        yield f"round { ({key: row.get(key) for key in kept}) }"
