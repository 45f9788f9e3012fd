"""Asks `python -m atoll.forecast` for plans: the hub itself never loads torch.

One process at a time, for at most `LIMIT_S`. An answer is kept as long as the job file, the
scaling law and the machines stay as they are, their rates within about 15 %.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.errors import ConfigError, HubError, LimitReached, PlanError, from_dict
from atoll.hub.security.auth import Identity
from atoll.system import before_program
from atoll.wire.states import NodeState

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

COMMAND = (sys.executable, "-P", "-m", "atoll.forecast")
LIMIT_S = 300.0
"""A plan takes 4 to 8 s of a core's time; a busy machine may need a hundred times as long."""
NICENESS = 3
"""Of the process: each login that may look at a job may ask for plans, and rounds go first. With 10
it gets a fiftieth of a busy machine's time, and a plan takes minutes."""
MOST_WAITING = 8
MOST_OF_OTHERS = 4
MOST_OF_ONE = 2
"""Places of all logins without the operator's role, and of one of them, so that others find one.
The hub itself, which plans running jobs again, always has a place."""
MOST_KEPT = 32
AWAY = (NodeState.LOST, NodeState.LEFT)
"""States of machines that are not connected."""
LAW_FILE = "scaling.json"
"""In the hub's data folder: a scaling law, by which losses are predicted too."""
STEPS_PER_FACTOR = 7.0
"""Rates that differ by less than a step of e^(1/7), 15 %, may count as the same."""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a running job, whose keys are to be answered again."""

    keys: list[str]
    current: dict[str, Any]
    """Their values now."""
    step_s: dict[str, float]
    """Measured seconds of a step, by node."""
    links: list[dict[str, Any]] = []
    """Measured between the nodes: `between`, `mbps`, `latency_ms`."""


class Planner:
    """See the module's docstring."""

    def __init__(self, *, data: Path, torch: bool, limit_s: float = LIMIT_S) -> None:
        """`torch`: whether this machine has it; without, nothing is planned here."""
        self._law, self._torch, self._limit_s = data / LAW_FILE, torch, limit_s
        self._turn = asyncio.Lock()
        self._waiting: Counter[Identity | None] = Counter()
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.started = 0
        """Processes started so far."""

    def check(self) -> None:
        """Raise HubError if nothing can be planned on this machine."""
        if not self._torch:
            raise HubError(
                "this hub cannot plan", given="torch is not installed on its machine",
                expected="torch here, or a plan made elsewhere",
                remedy="on a machine with torch: atoll plan job.toml; or here: "
                "pip install 'atoll[train]'",
            )  # fmt: skip

    async def ask(
        self, spec: str, nodes: Sequence[Row], *, events: Sequence[Row] = (), hub: str = "",
        running: Running | None = None, by: Identity | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what the process answers; see `atoll/forecast/__main__.py`.

        `by`: who asks; None: the hub itself.

        Raises:
            AtollError: nothing can be planned; says why and what to do.
            LimitReached: too many plans are requested at once.
        """
        self.check()
        here = [row for row in nodes if row.get("state") not in AWAY]
        if not here:
            raise ConfigError(
                "no machine is online at this hub", given=f"{len(nodes)} known",
                remedy="start one with `atoll join`, or plan for a file: "
                "atoll plan job.toml --machines fleet.toml",
            )  # fmt: skip
        law = _text_of(self._law)
        request = {
            "spec": spec, "nodes": here, "events": list(events), "hub": hub,
            "law": str(self._law) if law else "", "running": running,
        }  # fmt: skip
        key = _key_of(request | {"law": law})
        self._admit(by)
        self._waiting[by] += 1
        try:
            async with self._turn:
                if key not in self._kept:
                    self._kept[key] = await self._run(msgspec.json.encode(request))
                self._kept.move_to_end(key)
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
                answer = self._kept[key]
        finally:
            self._waiting[by] -= 1
            self._waiting += Counter()  # keeps those that wait
        return _read(answer)

    def _admit(self, by: Identity | None) -> None:
        """Raise LimitReached if there is no place for another plan of this login."""
        if by is None:
            return
        places = {"": (self._waiting.total() - self._waiting[None], MOST_WAITING)}
        if by.role != "operator":
            others = sum(n for one, n in self._waiting.items() if one and one.role != "operator")
            places |= {
                " by viewers": (others, MOST_OF_OTHERS),
                " by this login": (self._waiting[by], MOST_OF_ONE),
            }
        for scope, (waiting, most) in places.items():
            if waiting >= most:
                raise LimitReached(
                    f"too many plans are requested at once{scope}",
                    given=f"{waiting} are waiting", expected=f"at most {most}",
                    remedy="ask again in a minute",
                )  # fmt: skip

    async def _run(self, request: bytes) -> bytes:
        """Run the process; return its answer, which may be an error that it found."""
        self.started += 1
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, preexec_fn=before_program(niceness=NICENESS),
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._limit_s):
                output, complaint = await process.communicate(request)
        except TimeoutError as error:
            raise PlanError(
                "the plan was not made in time", given=f"{self._limit_s:g} s",
                remedy="on a machine with less to do: atoll plan job.toml",
            ) from error  # fmt: skip
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode not in (0, 1) or not output:
            logger.error("a plan failed: %s", complaint.decode(errors="replace")[-2000:])
            raise PlanError(
                "the plan was not made", given=f"exit status {process.returncode}",
                remedy="see the hub's log; or plan elsewhere: atoll plan job.toml",
            )  # fmt: skip
        return output


def _text_of(path: Path) -> str:
    """Return the text of a file; empty: it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read(answer: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(answer)
    if "error" in found:
        raise from_dict(found["error"])
    return found


def _key_of(request: Mapping[str, Any]) -> str:
    """Return what must be equal for an answer to be used again."""
    machines = sorted(map(_about, request["nodes"]))
    kept = [request["spec"], request["law"], request["running"], machines]
    return hashlib.sha256(msgspec.json.encode(kept)).hexdigest()


def _about(row: Row) -> tuple[Any, ...]:
    info, stats = row.get("info") or {}, row.get("stats") or {}
    return (
        str(row["node"]), info.get("matmul_gflops"), info.get("memory_bytes"),
        info.get("gpu_memory_bytes"), _rough(stats.get("up_bps")), _rough(stats.get("down_bps")),
        _rough(stats.get("latency_ms")),
    )  # fmt: skip


def _rough(value: Any) -> int | None:
    """Return a figure on a coarse scale, so that its noise does not count."""
    return round(STEPS_PER_FACTOR * math.log(value)) if value and value > 0 else None
