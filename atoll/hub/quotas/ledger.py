"""Use and limits of every holder of a quota.

Nothing is counted twice: the use is read from the stores each time. The ledger itself keeps only
the newest refusals.
"""

from __future__ import annotations

import collections
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from atoll.clock import Clock
from atoll.config.sizes import size_text
from atoll.errors import LimitReached
from atoll.hub.quotas.limits import DEFAULT_QUOTAS, FILE, Kind, Quotas

REACHED_S = 60.0
"""How long after a refusal a limit counts as reached."""
_MOST_REFUSALS = 4_096


class Holder(NamedTuple):
    """Who uses something."""

    role: str
    """`node`, `operator`, `viewer`, `job`; `queue` for one, `queues` for those of no job."""
    name: str
    member: str = ""
    """The member of a job; empty: the whole job, or no job."""

    @property
    def text(self) -> str:
        """The holder for people, e.g. `node lap1` or `job toy-1/w0`."""
        name = f"{self.name}/{self.member}" if self.member else self.name
        return name if self.role == self.name else f"{self.role} {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How much one holder uses of one kind."""

    kind: Kind
    holder: Holder
    used: int
    limit: int
    """0: none."""
    refused: int = 0
    """How often it was refused something since the hub started."""
    refused_at: float | None = None
    """Unix time of the last refusal."""
    reached: bool = False
    """Whether the limit is used up, or something was refused in the last minute."""

    @property
    def figures(self) -> tuple[str, str]:
        """Use and limit for people."""
        if self.kind.in_bytes:
            return size_text(self.used), size_text(self.limit) if self.limit else "any"
        return f"{self.used:,}", f"{self.limit:,}" if self.limit else "any"


Source = Callable[[], Awaitable[Iterable[tuple[Kind, Holder, int]]]]
"""Reads how much is used of some kinds, where it is stored."""


@dataclass(slots=True)
class _Refusals:
    times: int = 0
    at: float = 0.0
    used: int = 0


class Ledger:
    """The quotas of a hub, applied."""

    def __init__(self, quotas: Quotas = DEFAULT_QUOTAS, *, clock: Clock) -> None:
        self.quotas = quotas
        self._clock = clock
        self.sources: list[Source] = []
        self.overrides: Callable[[str, str], Mapping[str, int]] = _none_of
        """Limits of a login or node by its role and name, where its ticket has set some."""
        self.renew: Callable[[str, str], None] = _no_tokens
        """Records that a token of this role and name was just made."""
        self.submitter: Callable[[str], tuple[str, str]] = _no_login
        """Role and name of the login that submitted a job; empty: not known."""
        self._refusals: collections.OrderedDict[tuple[Kind, Holder], _Refusals]
        self._refusals = collections.OrderedDict()

    def limit(self, kind: Kind, holder: Holder) -> int:
        """Return how much a holder may use; 0: any amount.

        For a job the limits of the login that submitted it hold, except those on its token.
        """
        if kind.of_token:
            role, name = holder.role, holder.name
            if role == "job":
                role, name = self.submitter(name) if kind in _OF_JOBS else ("", "")
            if name and (found := self.overrides(role, name).get(kind.value)) is not None:
                return found
        return self.quotas.of(kind)

    def refuse(
        self, kind: Kind, holder: Holder, *, used: int, wanted: int, remedy: str
    ) -> LimitReached:
        """Note that a holder is refused `wanted` more; return the error that says so."""
        limit = self.limit(kind, holder)
        self.note(kind, holder, used=used)
        if kind.in_bytes:
            has, more, most = size_text(used), size_text(wanted), size_text(limit)
        else:
            has, more, most = f"{used:,}", f"{wanted:,}", f"{limit:,}"
        return LimitReached(
            f"{holder.text} has reached a limit of this hub: {kind.text}",
            given=f"{has} in use, {more} more",
            expected=f"at most {most} ({kind.value} in {self.place(kind, holder)})",
            remedy=remedy,
        )

    def place(self, kind: Kind, holder: Holder) -> str:
        """Return where the limit of a holder was set."""
        return "its ticket" if self.limit(kind, holder) != self.quotas.of(kind) else FILE

    def note(self, kind: Kind, holder: Holder, *, used: int, times: int = 1) -> None:
        """Note that a holder was refused something, `times` times."""
        found = self._refusals.pop((kind, holder), None) or _Refusals()
        found.times, found.at, found.used = found.times + times, self._clock.wall(), used
        self._refusals[kind, holder] = found
        if len(self._refusals) > _MOST_REFUSALS:
            self._refusals.popitem(last=False)

    async def uses(self) -> list[Use]:
        """Return the use of all holders, those closest to their limits first."""
        found: dict[tuple[Kind, Holder], int] = {}
        for source in self.sources:
            found |= {(kind, holder): used for kind, holder, used in await source()}
        now = self._clock.wall()
        for key, refusals in self._refusals.items():
            if now - refusals.at < REACHED_S:
                found.setdefault(key, refusals.used)
        uses = [self._use(kind, holder, used, now) for (kind, holder), used in found.items()]
        return sorted(uses, key=_fullness, reverse=True)

    def _use(self, kind: Kind, holder: Holder, used: int, now: float) -> Use:
        limit, refusals = self.limit(kind, holder), self._refusals.get((kind, holder))
        lately = refusals is not None and now - refusals.at < REACHED_S
        return Use(
            kind=kind, holder=holder, used=used, limit=limit,
            refused=refusals.times if refusals else 0,
            refused_at=refusals.at if refusals else None,
            reached=lately or 0 < limit <= used,
        )  # fmt: skip


_OF_JOBS = (Kind.JOB_DISK, Kind.JOB_QUEUES)


def _fullness(use: Use) -> tuple[bool, float, int]:
    return use.reached, use.used / use.limit if use.limit else 0.0, use.used


def _none_of(role: str, name: str) -> Mapping[str, int]:
    return {}


def _no_tokens(role: str, name: str) -> None:
    """Default without tickets."""


def _no_login(job: str) -> tuple[str, str]:
    return "", ""
