"""Timelines: where the time of each attempt went, per member. For display only.

The hub measures phases from joins, plans, votes and verdicts, including the network. With its next
join each member reports its local times, which replace the hub's. They are validated, and no
decision may depend on them, so a lying member does no harm.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atoll.hub.db.database import Database
from atoll.wire.messages import MemberStats, RoundJoin, RoundPlan, RoundVote, Verdict

PHASES = ("wait", "send", "vote", "apply", "upload")
"""Phases that `MemberStats` may name, in seconds; others are dropped."""

LONGEST_S = 30 * 86_400.0

LARGEST = 1e30


def validate_stats(join: RoundJoin) -> tuple[RoundJoin, list[str]]:
    """Return a join with valid statistics only, and what was invalid, e.g. ``loss is nan``."""
    stats = join.stats
    if stats is None:
        return join, []
    odd: list[str] = []
    phases: dict[str, float] = {}
    for name in PHASES:
        if name in stats.phases:
            seconds = usable_stats(stats.phases[name], name, odd, least=0.0, most=LONGEST_S)
            if seconds is not None:
                phases[name] = seconds
    if not stats.phases.keys() <= set(PHASES):
        odd.append("phases have unknown names")
    clean = MemberStats(
        phases=phases,
        update_norm=usable_stats(stats.update_norm, "update_norm", odd, least=0.0, most=LARGEST),
        loss=usable_stats(stats.loss, "loss", odd, least=-LARGEST, most=LARGEST),
        sent_bytes=usable_stats(stats.sent_bytes, "sent_bytes", odd, least=0.0, most=LARGEST),
    )
    return msgspec.structs.replace(join, stats=clean), odd


def validate_vote(vote: RoundVote) -> tuple[RoundVote, list[str]]:
    """Return a vote with valid statistics in its report, if it has one, and what was invalid."""
    if vote.report is None:
        return vote, []
    report, odd = validate_stats(vote.report)
    return msgspec.structs.replace(vote, report=report), odd


def usable_stats(
    value: float | None, name: str, odd: list[str], *, least: float, most: float
) -> float | None:
    """Return a valid figure; otherwise return None and append a message to `odd`."""
    if value is None:
        return None
    if math.isfinite(value) and least <= value <= most:
        return value
    odd.append(f"{name} is {value:.3g}")
    return None


class Row(msgspec.Struct, kw_only=True, frozen=True):
    """One member in one attempt of a round; None: unknown."""

    member: str
    node: str = ""
    compute_s: float | None = None
    """From the previous round to its join, without applying that round's result."""
    wait_s: float | None = None
    """From its join until all had joined."""
    send_s: float | None = None
    """The exchange: encode, send, wait for the mean."""
    vote_s: float | None = None
    apply_s: float | None = None
    update_norm: float | None = None
    loss: float | None = None
    tokens: int | None = None
    """Trained on in this period."""
    steps: int = 0
    odd: list[str] = []
    """Reported statistics that were rejected as invalid, e.g. `loss is nan`."""
    upload_s: float | None = None
    """Part of `send_s` until its contribution was sent."""
    sent_bytes: float | None = None
    """In this round, on any route."""


ROW_FIELDS = Row.__struct_fields__


@dataclass(frozen=True, slots=True)
class Completed:
    """Rows of the last committed attempt, completed by the members' reports."""

    epoch: int
    rows: list[Row]


@dataclass
class _Open:
    plan: RoundPlan
    planned_at: float
    joins: dict[str, RoundJoin]
    came: Mapping[str, float]
    voted: dict[str, float] = field(default_factory=dict)


@dataclass
class Timeline:
    """Records one job's rounds; times are monotonic seconds."""

    _joins: dict[str, RoundJoin] = field(default_factory=dict)
    _came: dict[str, float] = field(default_factory=dict)
    _odd: dict[str, list[str]] = field(default_factory=dict)
    _open: _Open | None = None
    _tokens: dict[str, int] = field(default_factory=dict)
    """Total tokens of each member at the last committed round."""
    _attempts: int = 0
    """Aborted attempts of the present round."""
    _last: Completed | None = None
    _reported: set[tuple[str, str]] = field(default_factory=set)

    def joined(self, member: str, body: RoundJoin, odd: Sequence[str], now: float) -> list[str]:
        """Record a join and its invalid statistics; return those not reported before."""
        known = self._joins.get(member)
        if known is None or known.round != body.round:
            self._came[member] = now
        self._joins[member] = body
        return self._note_odd(member, odd)

    def _note_odd(self, member: str, odd: Sequence[str]) -> list[str]:
        self._odd[member] = list(odd)
        fresh = [text for text in odd if (member, text.partition(" is ")[0]) not in self._reported]
        self._reported |= {(member, text.partition(" is ")[0]) for text in odd}
        return fresh

    def planned(self, plan: RoundPlan, now: float) -> Completed | None:
        """Record a plan; return the last committed attempt updated by the members' reports."""
        joins = {m: self._joins.pop(m) for m in plan.members if m in self._joins}
        came = {m: self._came.pop(m) for m in plan.members if m in self._came}
        self._open = _Open(plan, now, joins, came)
        last, self._last = self._last, None
        if last is None:
            return None
        rows = [_with_phases(row, joins.get(row.member)) for row in last.rows]
        return Completed(last.epoch, rows) if rows != last.rows else None

    def recall(self, plan: RoundPlan, joins: Mapping[str, RoundJoin], now: float) -> None:
        """Restore an attempt planned before a restart of the hub, without times."""
        self._open = _Open(plan, now, dict(joins), {})

    def voted(self, member: str, vote: RoundVote, now: float, odd: Sequence[str] = ()) -> list[str]:
        """Record a member's first vote, its newer report, and what is invalid in that.

        Returns what was not reported before.
        """
        if self._open is None or self._open.plan.epoch != vote.epoch:
            return []
        self._open.voted.setdefault(member, now)
        if vote.report is None or member not in self._open.joins:
            return []
        self._open.joins[member] = vote.report
        return self._note_odd(member, odd)

    def decided(self, verdict: Verdict, nodes: Mapping[str, str], now: float) -> list[Row]:
        """Return the rows of an attempt that was just decided; `nodes` by member."""
        seen, self._open = self._open, None
        if seen is None or seen.plan.epoch != verdict.epoch:
            return []
        rows = [self._row(seen, m, nodes.get(m, ""), verdict, now) for m in seen.plan.members]
        if verdict.committed:
            self._last = Completed(verdict.epoch, rows) if self._attempts == 0 else None
            self._attempts = 0
            self._tokens |= {m: join.tokens for m, join in seen.joins.items()}
        else:
            self._attempts += 1
        return rows

    def _row(self, seen: _Open, member: str, node: str, verdict: Verdict, now: float) -> Row:
        voted, came = seen.voted.get(member), seen.came.get(member)
        times: dict[str, Any] = {
            "wait_s": None if came is None else max(0.0, seen.planned_at - came),
            "send_s": None if voted is None else max(0.0, voted - seen.planned_at),
            "vote_s": None if voted is None else max(0.0, now - voted),
        }
        join = seen.joins.get(member)
        # aborted work is counted when a later attempt commits it
        if join is None or not verdict.committed:
            return Row(member=member, node=node, **times)
        odd = self._odd.pop(member, [])
        stats = join.stats or MemberStats()
        busy_s = usable_stats(join.busy_s, "busy_s", odd, least=0.0, most=LONGEST_S)
        if busy_s is not None:
            busy_s = max(0.0, busy_s - stats.phases.get("apply", 0.0))
        return Row(
            member=member,
            node=node,
            compute_s=busy_s,
            update_norm=stats.update_norm,
            loss=stats.loss,
            tokens=self._tokens_of(member, join),
            steps=max(0, join.steps),
            odd=odd,
            **times,
        )

    def _tokens_of(self, member: str, join: RoundJoin) -> int | None:
        """Return the tokens of this period; None after a restart of the process."""
        before = self._tokens.get(member)
        if before is None:
            return None
        return join.tokens - before if join.tokens >= before else None


def _with_phases(row: Row, join: RoundJoin | None) -> Row:
    if join is None or join.stats is None:
        return row
    fields: dict[str, float] = {f"{name}_s": s for name, s in join.stats.phases.items()}
    if join.stats.sent_bytes is not None:
        fields["sent_bytes"] = join.stats.sent_bytes
    return msgspec.structs.replace(row, **fields)


def round_bytes(route: str, relayed: int, rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return what members sent in a round; None: not known yet.

    Members report it with their next join. Before, only what the hub relayed is known.
    """
    sent = [row["sent_bytes"] for row in rows if row["sent_bytes"] is not None]
    if rows and len(sent) == len(rows):
        return int(sum(sent))
    return relayed if route != "direct" else None


def row_view(row: Row) -> dict[str, Any]:
    """Return a row for the API."""
    return {name: getattr(row, name) for name in ROW_FIELDS}


SCHEMA = """
CREATE TABLE IF NOT EXISTS round_timelines (
    job TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    members BLOB NOT NULL,
    PRIMARY KEY (job, epoch)
) WITHOUT ROWID;
"""

MAX_ROWS = 50_000
"""Members times attempts per job, about 5 MB."""
LEAST_KEPT = 200
"""Attempts per job kept regardless of its number of members."""

_THIN_EVERY = 64

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[list[Any]])


def encode(rows: Sequence[Row]) -> bytes:
    """Encode rows without field names."""
    return _encoder.encode([[getattr(row, name) for name in ROW_FIELDS] for row in rows])


def decode(data: bytes) -> list[Row]:
    """Decode rows; columns added later get their defaults."""
    return [
        Row(**dict(zip(ROW_FIELDS, values, strict=False)))  # rows of older hubs have fewer values
        for values in _decoder.decode(data)
    ]


def views(data: bytes | None) -> list[dict[str, Any]]:
    """Return stored rows for the API."""
    return [] if data is None else [row_view(row) for row in decode(data)]


def store(connection: sqlite3.Connection, job: str, epoch: int, rows: bytes) -> None:
    """Write or replace the rows of an attempt (writer thread)."""
    connection.execute(
        "INSERT OR REPLACE INTO round_timelines VALUES (?, ?, ?)", (job, epoch, rows)
    )


def thin(connection: sqlite3.Connection, job: str, epoch: int, *, members: int) -> None:
    """Delete every second timeline of the older half above the limit (writer thread)."""
    if epoch % _THIN_EVERY:
        return
    epochs = [
        found
        for (found,) in connection.execute(
            "SELECT epoch FROM round_timelines WHERE job = ? ORDER BY epoch", (job,)
        )
    ]
    if len(epochs) > max(LEAST_KEPT, MAX_ROWS // max(1, members)):
        gone = epochs[1 : len(epochs) // 2 : 2]
        connection.executemany(
            "DELETE FROM round_timelines WHERE job = ? AND epoch = ?", [(job, e) for e in gone]
        )


class CatchUp(msgspec.Struct, frozen=True):
    """A committed round with its timeline."""

    epoch: int
    round: int
    route: str
    members: list[str]
    contributors: list[str]
    time: float
    seconds: float
    nbytes: int
    """Through the relay."""
    rows: list[Row]


class _Plan(msgspec.Struct):
    route: str
    members: list[str]


class _Verdict(msgspec.Struct):
    committed: bool
    contributors: list[str] = []


_plans = msgspec.msgpack.Decoder(_Plan)
_verdicts = msgspec.msgpack.Decoder(_Verdict)


async def catch_up(
    database: Database, job: str, *, after: int = 0, newest: int = 1_000
) -> list[CatchUp]:
    """Return the newest committed rounds with an epoch above `after`, oldest first."""
    return await database.read(
        lambda connection: find_catch_up(connection, job, after=after, newest=newest)
    )


def find_catch_up(
    connection: sqlite3.Connection, job: str, *, after: int = 0, newest: int = 1_000
) -> list[CatchUp]:
    """Implements :func:`catch_up` in the reader thread."""
    rows = connection.execute(
        "SELECT r.epoch, r.round, r.plan, r.verdict, r.decided, r.seconds, r.nbytes, t.members"
        " FROM round_timelines t JOIN rounds r ON r.job = t.job AND r.epoch = t.epoch"
        " WHERE t.job = ? AND t.epoch > ? AND r.verdict IS NOT NULL"
        " ORDER BY t.epoch DESC LIMIT ?",
        (job, after, newest),
    ).fetchall()
    found = []
    for epoch, round_, plan_bytes, verdict_bytes, time, seconds, nbytes, parts in reversed(rows):
        plan, verdict = _plans.decode(plan_bytes), _verdicts.decode(verdict_bytes)
        if verdict.committed:
            found.append(
                CatchUp(
                    epoch, round_, plan.route, plan.members, verdict.contributors,
                    time, seconds, nbytes, decode(parts),
                )
            )  # fmt: skip
    return found
