"""Who a round waits for, who may be in it, and what happens when the record is behind its members.

Pure questions about the state of a job's rounds, asked by `decisions.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from atoll.errors import LeftBehind
from atoll.ids import slot_of
from atoll.wire.messages import RoundJoin

Standing = Literal["expected", "launched", "recovering", "live", "away", "gone"]
"""expected: starts with the job, rounds wait for it. launched: a newcomer that has not asked for
the state yet, nobody waits. recovering: takes the state over, rounds wait a bounded time. live:
trains or waits in a join. away: its process is there, but it is not waited for until it speaks
again (it was silent, late or fell behind). gone: its process has ended, or it is leaving."""

LEAVING, RECOVERING = "this member is leaving", "this member takes over the state"
"""Why a wait in a join ended though nothing was wrong."""

AWAITED: frozenset[Standing] = frozenset({"expected", "live"})


@dataclass(frozen=True)
class Ahead:
    """Members that stand on a later round than the record, as after a restore of an older file."""

    round: int
    base: str
    members: tuple[str, ...]
    others: tuple[str, ...]
    """Those ahead that stand elsewhere."""


def ahead_of(joins: Mapping[str, RoundJoin], committed_round: int) -> Ahead | None:
    """Return where most of the members stand that joined a later round; in a tie, the latest."""
    later = {m: (j.round, j.base) for m, j in joins.items() if j.round > committed_round}
    if not later:
        return None
    counts = Counter(later.values())
    place = max(counts, key=lambda where: (counts[where], where[0], where[1]))
    members = sorted((m for m in later if later[m] == place), key=slot_of)
    return Ahead(*place, tuple(members), tuple(m for m in later if later[m] != place))


def present(standing: Mapping[str, Standing], joins: Iterable[str]) -> set[str]:
    """Return the members that are at work or wait for the next round."""
    return {m for m, s in standing.items() if s in AWAITED} | set(joins)


def shortage(count: int, least: int) -> str:
    """Return why a run with `count` members pauses, or nothing if that is enough."""
    return "" if count >= least else f"{count} of at least {least} members"


def left_behind(round_: int, committed_round: int) -> LeftBehind:
    """Return the error for a member that wants a round which is not the next one."""
    late = round_ < committed_round
    return LeftBehind(
        "the group went on without this member" if late else "this round is not the next one",
        given=f"round {round_}",
        expected=f"committed round {committed_round}",
        remedy="take over the committed state and join again",
    )


def differs(base: str, group: str, committed_round: int) -> LeftBehind:
    """Return the error for a member whose replica is not that of the group."""
    return LeftBehind(
        "your replica differs from that of the group",
        given=f"digest {base[:16]}",
        expected=f"{group[:16]} after committed round {committed_round}",
        remedy="take over the committed state and join again",
    )
