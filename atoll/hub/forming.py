"""Who may be in a round, and what happens when the record is behind its members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import LeftBehind
from atoll.ids import slot_of
from atoll.wire.messages import RoundJoin

LEAVING, RECOVERING = "this member is leaving", "this member takes over the state"
"""Why a wait in a join ended though nothing was wrong."""


@dataclass(frozen=True)
class Ahead:
    """Members that stand on a later round than the record, as after a restore of an older file."""

    round: int
    base: str
    members: tuple[str, ...]


def ahead_of(joins: Mapping[str, RoundJoin], committed_round: int) -> Ahead | None:
    """Return the state that the members which joined later rounds agree on.

    Most have it, or it is the one after that of most: the verdict that only some of them heard
    before the hub was lost. A claim of more than that proves nothing.
    """
    later = {m: (j.round, j.base) for m, j in joins.items() if j.round > committed_round}
    if not later:
        return None
    counts = Counter(later.values())

    def rank(place: tuple[int, str]) -> tuple[int, int, str]:
        return counts[place], *place

    usual = max(counts, key=rank)
    next_ones = [place for place in counts if place[0] == usual[0] + 1]
    place = max(next_ones, key=rank) if next_ones else usual
    members = sorted((m for m in later if later[m] == place), key=slot_of)
    return Ahead(*place, tuple(members))


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


def other_history(base: str, committed_round: int) -> LeftBehind:
    """Return the error for a member that comes from before the run was set back."""
    return LeftBehind(
        "the run was set back while this member was away",
        given=f"digest {base[:16]}",
        expected=f"the state after committed round {committed_round} as it is now",
        remedy="take over the committed state and join again",
    )


def wrong_lease(wrong: str) -> LeftBehind:
    """Return the error for a member that trains on data which others were given."""
    return LeftBehind(
        "this member trained on a stretch of the data that is not its own",
        given=wrong,
        expected="the stretch that the last verdict, or Sources, named",
        remedy="take over the committed state and join again",
    )
