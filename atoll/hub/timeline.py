"""Where the time of a round went, member by member, from what the hub sees and what members tell.

The hub knows when a member came, when the plan was made, when its vote and the verdict came: that
is its waiting, sending and voting, network included. With its next join each member tells the same
as it went on its own machine, and how long it took to apply the result; that then replaces what
the hub saw. None of this decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atoll.hub.accounts import LONGEST_S, usable
from atoll.wire.messages import Account, RoundJoin, RoundPlan, Verdict


class Row(msgspec.Struct, kw_only=True, frozen=True):
    """One member's part in one attempt of a round; None: not known."""

    member: str
    node: str = ""
    compute_s: float | None = None
    """From the last round to its join, without applying that round's result."""
    wait_s: float | None = None
    """From its join until all had come."""
    send_s: float | None = None
    """The exchange: encoding, sending, waiting for the mean."""
    vote_s: float | None = None
    """From its vote to the verdict."""
    apply_s: float | None = None
    update_norm: float | None = None
    loss: float | None = None
    tokens: int | None = None
    """Trained in this period."""
    steps: int = 0
    odd: list[str] = []
    """What it told that cannot be, e.g. `loss is nan`."""
    upload_s: float | None = None
    """Of the sending: until its own contribution had left."""


ROW_FIELDS = Row.__struct_fields__


@dataclass(frozen=True, slots=True)
class Completed:
    """Rows of the last committed attempt, now with what its members told of it."""

    epoch: int
    rows: list[Row]


@dataclass
class _Open:
    """The attempt that awaits its verdict, as far as it was seen."""

    plan: RoundPlan
    planned_at: float
    joins: Mapping[str, RoundJoin]
    came: Mapping[str, float]
    voted: dict[str, float] = field(default_factory=dict)


@dataclass
class Timeline:
    """One job's rounds as they pass. Times are monotonic seconds handed in as `now`."""

    _joins: dict[str, RoundJoin] = field(default_factory=dict)
    _came: dict[str, float] = field(default_factory=dict)
    _odd: dict[str, list[str]] = field(default_factory=dict)
    _open: _Open | None = None
    _tokens: dict[str, int] = field(default_factory=dict)
    """What each member had trained in all at the last committed round."""
    _attempts: int = 0
    """Of the present round, aborted before."""
    _last: Completed | None = None
    _told: set[tuple[str, str]] = field(default_factory=set)

    def joined(self, member: str, body: RoundJoin, odd: Sequence[str], now: float) -> list[str]:
        """Note a join, and what was absurd in it; return what of that people do not know yet."""
        known = self._joins.get(member)
        if known is None or known.round != body.round:
            self._came[member] = now
        self._joins[member], self._odd[member] = body, list(odd)
        fresh = [text for text in odd if (member, text.partition(" is ")[0]) not in self._told]
        self._told |= {(member, text.partition(" is ")[0]) for text in odd}
        return fresh

    def planned(self, plan: RoundPlan, now: float) -> Completed | None:
        """Note a plan; return the last committed attempt with what its members have told since."""
        joins = {m: self._joins.pop(m) for m in plan.members if m in self._joins}
        came = {m: self._came.pop(m) for m in plan.members if m in self._came}
        self._open = _Open(plan, now, joins, came)
        last, self._last = self._last, None
        if last is None:
            return None
        rows = [_with_account(row, joins.get(row.member)) for row in last.rows]
        return Completed(last.epoch, rows) if rows != last.rows else None

    def recall(self, plan: RoundPlan, joins: Mapping[str, RoundJoin], now: float) -> None:
        """Take up an attempt that an earlier life of the hub had planned; times are not known."""
        self._open = _Open(plan, now, joins, {})

    def voted(self, member: str, epoch: int, now: float) -> None:
        """Note a vote; the first of a member counts."""
        if self._open is not None and self._open.plan.epoch == epoch:
            self._open.voted.setdefault(member, now)

    def decided(self, verdict: Verdict, nodes: Mapping[str, str], now: float) -> list[Row]:
        """Return the rows of an attempt that was just decided.

        Args:
            verdict: The verdict on it.
            nodes: Member -> the node that it runs on.
            now: Present time.
        """
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
        if join is None or not verdict.committed:  # the work counts where it is committed
            return Row(member=member, node=node, **times)
        odd = self._odd.pop(member, [])
        account = join.account or Account()
        busy_s = usable(join.busy_s, "busy_s", odd, least=0.0, most=LONGEST_S)
        if busy_s is not None:
            busy_s = max(0.0, busy_s - account.phases.get("apply", 0.0))
        return Row(
            member=member,
            node=node,
            compute_s=busy_s,
            update_norm=account.update_norm,
            loss=account.loss,
            tokens=self._tokens_of(member, join),
            steps=max(0, join.steps),
            odd=odd,
            **times,
        )

    def _tokens_of(self, member: str, join: RoundJoin) -> int | None:
        """Return the tokens of this period; a new process counts from its own beginning."""
        before = self._tokens.get(member)
        if before is None:
            return None
        return join.tokens - before if join.tokens >= before else None


def _with_account(row: Row, join: RoundJoin | None) -> Row:
    """Return a row with the phases that its member told, where it did."""
    if join is None or join.account is None:
        return row
    told = {f"{name}_s": seconds for name, seconds in join.account.phases.items()}
    return msgspec.structs.replace(row, **told)


def row_view(row: Row) -> dict[str, Any]:
    """Return a row as the API shows it."""
    return {name: getattr(row, name) for name in ROW_FIELDS}
