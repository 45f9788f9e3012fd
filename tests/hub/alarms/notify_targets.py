"""Alarms by hand, a real web server that hooks can tell, and hooks at work."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from atoll.clock import RealClock
from atoll.hub.alarms.engine import Alarm, Finding
from atoll.hub.alarms.notify import Notifier
from atoll.hub.alarms.notify_config import NotifyTarget
from atoll.hub.alarms.notify_senders import send
from tests.patience import PATIENCE_S

WAIT_S = PATIENCE_S


def alarm(
    id_: int = 1, *, ended: float | None = None, silenced: bool = False, **more: Any
) -> Alarm:
    fields = {"kind": "straggler", "cause": "lap3 is slow", "remedy": "atoll drain lap3",
            "severity": "warning", "job": "j1", "node": "lap3"}  # fmt: skip
    return Alarm(id_, Finding(**(fields | more)), 1.0, 2.0, ended, silenced)


def message(*alarms: Alarm) -> dict[str, Any]:
    views = [a.view() for a in alarms or (alarm(),)]
    return {"hub": "http://hub", "time": 3.0, "alarms": views, "left_out": 0}


# ------------------------------------------------------------------------ who is notified


@dataclass
class Web:
    """A web server that answers as configured and keeps what came."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    came: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    wait_s: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def web() -> Iterator[Web]:
    kept = Web()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.came.append(({k.lower(): v for k, v in self.headers.items()}, body))
            kept.over.wait(kept.wait_s)
            self.send_response(kept.statuses.pop(0) if kept.statuses else 204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    kept.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    yield kept
    kept.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


@dataclass
class StoredEvents:
    """Stands in for the events of a hub."""

    texts: list[str] = field(default_factory=list)

    async def add(self, job: str, kind: str, text: str, **more: Any) -> int:
        self.texts.append(f"{kind}: {text}")
        return len(self.texts)


def run_hooks(
    hooks: list[NotifyTarget],
    work: Callable[[Notifier], Awaitable[None]],
    sender: Callable[[NotifyTarget, Mapping[str, Any]], Awaitable[None]] = send,
) -> StoredEvents:
    """Run hooks beside some work; return the events that were stored."""
    stored = StoredEvents()
    events: Any = stored

    async def body() -> None:
        made = Notifier(
            hooks, events=events, clock=RealClock(), hub="http://hub", send=sender, gather_s=0.05,
            first_pause_s=0.01,
        )  # fmt: skip
        task = asyncio.create_task(made.run())
        await asyncio.wait_for(work(made), WAIT_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(body())
    return stored


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
