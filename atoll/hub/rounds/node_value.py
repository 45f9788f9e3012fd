"""Estimates what each node adds to a job's throughput, from measured round times.

Model of a synchronous round, where member m computes for c_m seconds and applies results in a_m,
the exchange takes x seconds and the verdict v:

    period = max over m of (c_m + a_m)  +  x  +  v  +  rest
    rate   = sum over m of tokens_m / period

`rest` is unexplained measured time (evaluation, checkpoints) and stays constant. Without a node,
its members leave the maximum and the sum, and x shrinks: proportional to the number of members n
through the hub, to (n - 1) / n directly; extra upload time of a node's contribution goes with it.
If slower members do fewer steps and the fastest leaves, the others do proportionally more. Members
that train separate models do not wait; their rates add up. All figures are means over the newest
rounds of the same members.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from atoll.hub.db.database import Database
from atoll.hub.jobs.jobs import Jobs
from atoll.hub.rounds.timeline import CatchUp, Row, catch_up
from atoll.wire.states import JobState

LEAST_ROUNDS = 5
NEWEST = 60
MOST_ROUNDS = 20
UNUSUAL = 3.0
"""Rounds longer than this many medians are ignored (suspended machine, first step)."""
TELLING = 0.02
"""Recommend removal only if the group would be faster by more than this share."""


class Advice(StrEnum):
    """What is best done with a node."""

    KEEP = "keep"
    REMOVE = "remove"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class _Part:
    node: str
    compute_s: float
    apply_s: float
    send_s: float
    vote_s: float
    upload_s: float | None
    units: float
    """Tokens; steps if tokens are not counted."""
    steps: int


@dataclass(frozen=True, slots=True)
class _Round:
    parts: Mapping[str, _Part]
    route: str
    period_s: float

    def model_s(self, members: Collection[str], *, alone: bool, more: float = 1.0) -> float:
        """Return the modelled seconds of a round with `more` times the steps; `alone`: no waits."""
        parts = [self.parts[m] for m in members]
        if alone:
            return self.period_s * more
        computing_s = max(part.compute_s * more + part.apply_s for part in parts)
        return computing_s + self.exchange_s(members, len(members))

    def exchange_s(self, members: Collection[str], count: int) -> float:
        """Return the seconds of exchange and vote for `count` members like these."""
        if count < 2 or len(self.parts) < 2:
            return 0.0
        grown = _growth(self.route, count) / _growth(self.route, len(self.parts))
        vote_s = min(part.vote_s for part in self.parts.values())
        send_s = max(self.parts[m].send_s for m in members)
        uploads = {m: part.upload_s for m, part in self.parts.items() if part.upload_s is not None}
        if len(uploads) < len(self.parts):
            return send_s * grown + vote_s
        # Time common to all contributions is due to the hub, the rest to the member.
        least_s = min(uploads.values())
        slowest_s = max(uploads.values()) - least_s
        common_s = max(0.0, send_s - slowest_s)
        return max(uploads[m] for m in members) - least_s + common_s * grown + vote_s

    def units(self, members: Collection[str]) -> float:
        return sum(self.parts[m].units for m in members)

    def more_steps(self, members: Collection[str]) -> float:
        """Return the factor on the steps of the rest if the fastest member leaves."""
        most = max(part.steps for part in self.parts.values())
        left = max(self.parts[m].steps for m in members)
        return most / left if left else 1.0


def _growth(route: str, count: int) -> float:
    return (count - 1) / count if route == "direct" else float(count)


def marginal_throughput(
    rounds: Sequence[CatchUp], *, alone: bool = False, running: Collection[str] | None = None
) -> dict[str, Any]:
    """Return what the nodes of a job are worth; docs/operate/alarms.md explains the keys.

    `rounds` are committed, oldest first; `running` None: the members of the last round. While
    there are too few rounds of these members, the last figures of earlier ones hold.
    """
    members = _present(rounds, running)
    return (
        _figures(rounds, members, alone=alone)
        or _before(rounds, alone=alone)
        or _too_early(members, rounds)
    )


def _figures(
    rounds: Sequence[CatchUp], members: Sequence[str], *, alone: bool
) -> dict[str, Any] | None:
    """Return what these members were worth in the newest rounds; None: too few rounds."""
    unit = _unit(rounds)
    known = _known(rounds, members, unit=unit)
    if len(known) < LEAST_ROUNDS:
        return None
    measured = sum(r.units(members) for r in known) / sum(r.period_s for r in known)
    speeds = {m: _speed([r.parts[m] for r in known]) for m in members}
    best = max(speeds, key=lambda m: speeds[m])
    by_node: dict[str, list[str]] = {}
    for member in members:
        by_node.setdefault(known[-1].parts[member].node, []).append(member)
    nodes = [
        _node(node, own, known, members, rate=measured, alone=alone, unit=unit)
        for node, own in by_node.items()
    ]
    follows = _next(known, members, rate=measured, alone=alone)
    speedup = measured / speeds[best] if speeds[best] else None
    best_node = known[-1].parts[best].node
    return {
        "unit": unit,
        "rounds": len(known),
        "as_of_round": rounds[-1].round + 1,
        "tokens_per_s": measured,
        "best_single": {"node": best_node, "tokens_per_s": speeds[best]},
        "speedup": speedup,
        "nodes": nodes,
        "next": follows,
        "text": _text(nodes, follows, measured, speeds[best], best_node, unit=unit),
    }


def _before(rounds: Sequence[CatchUp], *, alone: bool) -> dict[str, Any] | None:
    """Return the last figures of earlier members, e.g. before one was drained; None: never."""
    changes = [
        end
        for end in range(len(rounds), LEAST_ROUNDS, -1)
        if end == len(rounds) or set(rounds[end].members) != set(rounds[end - 1].members)
    ]
    for end in changes:
        found = _figures(rounds[:end], rounds[end - 1].members, alone=alone)
        if found is not None:
            return found | {"text": f"at round {found['as_of_round']}: {found['text']}"}
    return None


def _present(rounds: Sequence[CatchUp], running: Collection[str] | None) -> list[str]:
    if not rounds:
        return []
    return [m for m in rounds[-1].members if running is None or m in running]


def _unit(rounds: Sequence[CatchUp]) -> str:
    return "tokens" if any(row.tokens for one in rounds for row in one.rows) else "steps"


def _known(rounds: Sequence[CatchUp], members: Sequence[str], *, unit: str) -> list[_Round]:
    """Return the newest complete rounds of exactly these members."""
    found: list[_Round] = []
    for one, before in zip(reversed(rounds[1:]), reversed(rounds[:-1]), strict=True):
        if len(found) == MOST_ROUNDS or set(one.members) != set(members):
            break
        parts = {row.member: part for row in one.rows if (part := _part(row, unit))}
        consecutive = one.round == before.round + 1 and set(before.members) == set(members)
        if parts.keys() == set(members) and consecutive and one.time > before.time:
            found.append(_Round(parts, one.route, one.time - before.time))
    usual_s = statistics.median([one.period_s for one in found]) if found else 0.0
    return [one for one in reversed(found) if one.period_s <= UNUSUAL * usual_s]


def _part(row: Row, unit: str) -> _Part | None:
    """Return a member's part if it did any work and all its times are known."""
    units = row.tokens if unit == "tokens" else row.steps
    if not units or not row.steps or row.compute_s is None:
        return None
    if row.send_s is None or row.vote_s is None:
        return None
    return _Part(
        row.node or row.member, row.compute_s, row.apply_s or 0.0, row.send_s, row.vote_s,
        row.upload_s, float(units), row.steps,
    )  # fmt: skip


def _speed(parts: Sequence[_Part]) -> float:
    busy_s = sum(part.compute_s for part in parts)
    return sum(part.units for part in parts) / busy_s if busy_s > 0 else 0.0


def _rate_without(
    known: Sequence[_Round], members: Sequence[str], left: Sequence[str], *, alone: bool
) -> float:
    """Return the modelled rate of the members `left`, relative to that of all."""
    seconds = seconds_left = units = units_left = 0.0
    for one in known:
        more = 1.0 if alone else one.more_steps(left)
        model_s = one.model_s(members, alone=alone)
        rest_s = max(0.0, one.period_s - model_s)
        seconds += model_s + rest_s
        seconds_left += one.model_s(left, alone=alone, more=more) + rest_s
        units += one.units(members)
        units_left += one.units(left) * more
    return (units_left / seconds_left) / (units / seconds) if seconds_left and units else 0.0


def _node(
    node: str, own: Sequence[str], known: Sequence[_Round], members: Sequence[str], *, rate: float,
    alone: bool, unit: str,
) -> dict[str, Any]:  # fmt: skip
    left = [m for m in members if m not in own]
    share = sum(r.units(own) for r in known) / sum(r.units(members) for r in known)
    without = _rate_without(known, members, left, alone=alone) * rate if left else 0.0
    adds = rate - without
    remove = bool(left) and without > rate * (1 + TELLING)
    if not left:
        text = f"{node} is the only machine"
    elif remove:
        text = (
            f"remove {node}: without it the group would reach {without:,.0f} {unit}/s "
            f"instead of {rate:,.0f}"
        )
    elif adds >= 0:
        text = f"keep {node}: it adds {adds:,.0f} {unit}/s ({adds / max(without, 1e-9):.0%})"
    else:
        text = f"keep {node}: without it the group is about as fast"
    return {
        "node": node,
        "member": ", ".join(own),
        "tokens_per_s": rate * share,
        "adds_tokens_per_s": adds,
        "adds_percent": 100.0 * adds / without if without > 0 else None,
        "advice": Advice.REMOVE if remove else Advice.KEEP,
        "text": text,
    }


def _next(
    known: Sequence[_Round], members: Sequence[str], *, rate: float, alone: bool
) -> dict[str, Any]:
    """Return what one more node like the median would add."""
    ordinal = _ordinal(len(members) + 1)
    if len(members) < 2 and not alone:
        text = f"what a {ordinal} node would add is not known: nothing was exchanged yet"
        return {"adds_percent": None, "text": text}
    seconds = seconds_more = units = units_more = 0.0
    for one in known:
        grown_s = 0.0
        if not alone:
            now_s = one.exchange_s(members, len(members))
            grown_s = one.exchange_s(members, len(members) + 1) - now_s
        seconds += one.period_s
        seconds_more += one.period_s + grown_s
        units += one.units(members)
        units_more += one.units(members)
        units_more += statistics.median([part.units for part in one.parts.values()])
    percent = 100.0 * ((units_more / seconds_more) / (units / seconds) - 1.0)
    if percent > 0:
        text = f"a {ordinal} node would add about {percent:.0f} %"
    else:
        text = f"a {ordinal} node would add nothing: communication takes too long"
    return {"adds_percent": percent, "text": text}


def _ordinal(number: int) -> str:
    last = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def _text(
    nodes: Sequence[Mapping[str, Any]], follows: Mapping[str, Any], rate: float, best: float,
    best_node: str, *, unit: str,
) -> str:  # fmt: skip
    times = f"{rate / best:.1f} times" if best else "more than"
    count = f"{len(nodes)} machine{'s' * (len(nodes) > 1)}"
    first = f"{count}: {rate:,.0f} {unit}/s, {times} the best single one ({best_node}: {best:,.0f})"
    removable = [node for node in nodes if node["advice"] == Advice.REMOVE]
    worst = min(removable, key=lambda node: node["adds_tokens_per_s"], default=None)
    return f"{first}; {worst['text'] if worst else follows['text']}"


OF_A_SWARM = "what a member of a SWARM adds is the speed of its stage: see the job's stages"


def _too_early(members: Sequence[str], rounds: Sequence[CatchUp]) -> dict[str, Any]:
    unit = _unit(rounds)
    found = len(_known(rounds, members, unit=unit))
    text = f"too early to say: {found} of {LEAST_ROUNDS} rounds"
    rows = {row.member: row for one in rounds for row in one.rows}
    nodes = [
        {
            "node": rows[m].node if m in rows else "", "member": m, "tokens_per_s": None,
            "adds_tokens_per_s": None, "adds_percent": None, "advice": Advice.UNKNOWN, "text": text,
        }
        for m in members
    ]  # fmt: skip
    return {
        "unit": unit, "rounds": found, "as_of_round": None, "tokens_per_s": None,
        "best_single": None, "speedup": None,
        "nodes": nodes, "next": {"adds_percent": None, "text": text}, "text": text,
    }  # fmt: skip


async def node_value(jobs: Jobs, database: Database, job: str) -> dict[str, Any]:
    """Return what a job's nodes are worth, now or when it ended; raises HubError."""
    record = jobs.get(job)
    if record.spec.parts_saved:  # its rounds are those of stages, and no member waits in them
        return _too_early([], []) | {"unit": "tokens", "text": OF_A_SWARM}
    running = None
    if record.state == JobState.RUNNING:
        running = {m.member for m in record.members.values() if m.live}
    return marginal_throughput(
        await catch_up(database, job, newest=NEWEST),
        alone=record.spec.alone,
        running=running,
    )
