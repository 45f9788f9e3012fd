"""What a hub is started with.

How the interpreter is set when a hub is all that a process does.

Measured with 1,000 producers: a message costs less than half the processor time with these.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.hub.alarms.watch import DEFAULT_INTERVALS, AlarmIntervals
from atoll.hub.jobs.retention import NOTHING_GOES, RetentionRules
from atoll.hub.scheduler.scheduler import KILL_GRACE_S
from atoll.hub.security.connection_limits import DEFAULT_LIMITS, Limits
from atoll.wire.limits import DEAD_AFTER_S


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """What a hub is started with."""

    data: Path
    """Folder of the hub's own state."""
    jobs: Path
    """Folder of the runs."""
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    """HOST, HOST:PORT or URL in the ticket; empty: found out."""
    prefix: str = ""
    """Path below which a reverse proxy shows the hub; empty: that of `advertise`."""
    announce: bool | None = None
    """Tell machines nearby that the hub is here; None: unless it is on loopback."""
    tls: str = "auto"
    """auto: TLS unless on loopback; on; off; or CERTIFICATE:KEY, two PEM files."""
    trust_proxy: tuple[str, ...] = ()
    """Addresses of reverse proxies whose X-Forwarded-For and -Proto count."""
    limits: Limits = DEFAULT_LIMITS
    """What strangers may take."""
    ticket_uses: int | None = None
    """How often the ticket may be used; None: without limit."""
    reducers: bool = True
    """Run reducers beside the hub where torch is installed."""
    queue: str = ""
    """Server of users' queues, e.g. `nats://HOST:PORT`; empty: the hub's own database."""
    otlp: str = ""
    """OpenTelemetry collector that gets the hub's figures, e.g. `http://HOST:4318`; empty: none."""
    hello_timeout_s: float = 10.0
    reconnect_grace_s: float = 5.0
    dead_after_s: float = DEAD_AFTER_S
    first_grace_s: float = 120.0
    """How long the first round of a job waits for members that are still starting."""
    kill_grace_s: float = KILL_GRACE_S
    """Time between asking a process of a stopping job to end and killing it."""
    restart_grace_s: float = 60.0
    """How long members may take to come back after a restart of the hub."""
    keeping: RetentionRules = NOTHING_GOES
    """How long jobs stay after their end."""
    alarm_intervals: AlarmIntervals = DEFAULT_INTERVALS
    """How often the hub looks for what goes wrong."""
    hooks: Path | None = None
    """Whom to tell of alarms; None: `hooks.toml` in the data folder, if it is there."""
    restore_from: Path | None = None
    """A backup, or a folder of backups, from which the folders are made if they are empty."""


SWITCH_S = 0.001
"""Longest that the writer's thread waits for the interpreter; Python's own choice is 5 ms, and a
commit needs the interpreter several times."""

GC_THRESHOLD = 50_000
"""Objects made before the collector looks at the young ones. Thousands of sessions make Python's
own choice (700) walk over all of them again and again."""


def apply_tuning() -> None:
    """Set this process for a hub; programs that run one among other things leave it."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(GC_THRESHOLD, 20, 50)
