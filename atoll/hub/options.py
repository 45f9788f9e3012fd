"""Options of a hub, and interpreter settings for a process that runs only a hub."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.hub.alarms.watch import DEFAULT_INTERVALS, AlarmIntervals
from atoll.hub.jobs.retention import NOTHING_GOES, RetentionRules
from atoll.hub.quotas.limits import Quotas
from atoll.hub.scheduler.scheduler import KILL_GRACE_S
from atoll.hub.security.connection_limits import DEFAULT_LIMITS, Limits
from atoll.wire.limits import DEAD_AFTER_S


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Options of a hub."""

    data: Path
    jobs: Path
    """Folder of the jobs' files."""
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    """HOST, HOST:PORT or URL for the ticket; empty: detected."""
    prefix: str = ""
    """Path under which a reverse proxy serves the hub; empty: that of `advertise`."""
    announce: bool | None = None
    """Announce the hub by mDNS; None: unless it listens on loopback."""
    tls: str = "auto"
    """`auto` (TLS unless on loopback), `on`, `off`, or CERTIFICATE:KEY, two PEM files."""
    trust_proxy: tuple[str, ...] = ()
    """Addresses of reverse proxies that may set X-Forwarded-For and -Proto."""
    limits: Limits = DEFAULT_LIMITS
    quotas: Quotas | None = None
    """How much each token, node and job may use; None: `quotas.toml` in the data folder."""
    ticket_uses: int | None = None
    """How often the ticket may be used; None: no limit."""
    reducers: bool = True
    """Run reducers on the hub's machine if torch is installed."""
    queue: str = ""
    """Server of the users' queues, e.g. `nats://HOST:PORT`; empty: the hub's database."""
    otlp: str = ""
    """OpenTelemetry collector for the hub's metrics, e.g. `http://HOST:4318`; empty: none."""
    hello_timeout_s: float = 10.0
    reconnect_grace_s: float = 5.0
    dead_after_s: float = DEAD_AFTER_S
    first_grace_s: float = 120.0
    """Seconds that the first round of a job waits for members that are still starting."""
    kill_grace_s: float = KILL_GRACE_S
    """Seconds between SIGTERM and SIGKILL when a job stops."""
    restart_grace_s: float = 60.0
    """Seconds that members have to reconnect after a restart of the hub."""
    copies: tuple[Path, ...] = ()
    """Folders of this machine into which jobs may have checkpoints copied."""
    keeping: RetentionRules = NOTHING_GOES
    alarm_intervals: AlarmIntervals = DEFAULT_INTERVALS
    hooks: Path | None = None
    """File with the alarm targets; None: `hooks.toml` in the data folder, if it exists."""
    restore_from: Path | None = None
    """Backup, or folder of backups, to restore if the data folder is empty."""


SWITCH_S = 0.001
"""Interpreter switch interval (Python's default is 5 ms). The database thread needs the
interpreter several times in a commit, and each time waits at most this long."""

GC_THRESHOLD = 50_000
"""Allocations before a young collection. With thousands of sessions Python's default (700) scans
their objects repeatedly. Both settings together halve the processor time per message of 1,000
producers.
"""


def apply_tuning() -> None:
    """Set this process up as a dedicated hub; do not call it in a process that does other work."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(GC_THRESHOLD, 20, 50)
