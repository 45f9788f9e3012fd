"""Quiet hours, in local time; and the node's own check of what its owner allows.

The hub places jobs by the offers of nodes. The check here does not depend on that, in case the hub
is faulty or was taken over.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from atoll.config import JobSpec
from atoll.config.harmless_variables import is_harmless
from atoll.errors import ConfigError, NotAllowed
from atoll.ids import is_reducer
from atoll.node.launchers.launcher import Mount, parse_mounts
from atoll.wire.messages import Offer

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

FORM = '"22:00-07:00" or "mon-fri 09:00-17:00" or "sat,sun 00:00-24:00", in local time'

_SPAN = re.compile(
    r"(?:(?P<days>[a-z,\s-]+?)\s+)?(?P<from>\d{1,2}:\d{2})\s*-\s*(?P<to>\d{1,2}:\d{2})"
)

DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class QuietHours:
    """A weekly span; one that ends at or before its start ends on the following day."""

    days: frozenset[int]
    """Weekdays on which it begins; 0 is Monday."""
    start_minute: int
    end_minute: int
    """Minute of the day, 1440 for midnight."""

    def end_of(self, now: datetime.datetime) -> datetime.datetime | None:
        """Return the end of the span that contains `now` (local time), or None."""
        minute = now.hour * 60 + now.minute
        overnight = self.end_minute <= self.start_minute
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        if now.weekday() in self.days and minute >= self.start_minute:
            if overnight:
                return _later(midnight, days=1, minutes=self.end_minute)
            if minute < self.end_minute:
                return _later(midnight, days=0, minutes=self.end_minute)
        yesterday = (now.weekday() - 1) % 7
        if overnight and yesterday in self.days and minute < self.end_minute:
            return _later(midnight, days=0, minutes=self.end_minute)
        return None


def _later(midnight: datetime.datetime, *, days: int, minutes: int) -> datetime.datetime:
    """Return a wall-clock time on a later day; days of 23 or 25 hours need no special case."""
    if minutes == DAY_MINUTES:
        days, minutes = days + 1, 0
    day = midnight.date() + datetime.timedelta(days=days)
    return datetime.datetime.combine(day, datetime.time(minutes // 60, minutes % 60))


def parse_quiet_hours(text: str) -> QuietHours:
    """Parse a span of the form `FORM`; raises ConfigError for any other."""
    wrong = ConfigError("these quiet hours cannot be read", given=repr(text), expected=FORM)
    match = _SPAN.fullmatch(text.strip().lower())
    if match is None:
        raise wrong
    start, end = _minute(match["from"]), _minute(match["to"])
    days = _days(match["days"])
    if start is None or end is None or start == DAY_MINUTES or not days:
        raise wrong
    return QuietHours(days, start, end)


def _minute(clock: str) -> int | None:
    """Return the minute of the day of HH:MM, or None if invalid."""
    hour, minute = (int(part) for part in clock.split(":"))
    total = hour * 60 + minute
    return total if minute < 60 and total <= DAY_MINUTES else None


def _days(text: str | None) -> frozenset[int]:
    """Return the days of e.g. `mon-fri` or `sat,sun`; empty if a name is unknown."""
    if text is None:
        return frozenset(range(7))
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        names = (first, last or first)
        if not all(name[:3] in DAYS and len(name) >= 3 for name in names):
            return frozenset()
        begin, end = (DAYS.index(name[:3]) for name in names)
        found.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(found)


def check_allowed(
    spec: JobSpec, *, member: str, offer: Offer, trusted_keys: Sequence[str] = ()
) -> list[Mount]:
    """Return the mounts of a process, after checking it against the owner's offer.

    A reducer is Atoll's own program and always allowed.

    Raises:
        NotAllowed: the kind of job, its image or a mount is not covered.
        ConfigError: a mount is malformed, or parts of the job contradict each other.
    """
    if is_reducer(member):
        return []
    kind = spec.permission
    if kind == "container" and kind not in offer.kinds and "signed" in offer.kinds:
        from atoll.node.identity.image_signatures import check_image

        check_image(spec.launch.image, signature=spec.launch.signature, trusted_keys=trusted_keys)
    elif kind == "script" and kind not in offer.kinds and "signed" in offer.kinds:
        _check_signed_code(spec, trusted_keys)
    elif kind not in offer.kinds:
        raise NotAllowed(
            f"this machine does not run jobs of the kind {kind!r}",
            expected=f"one of {', '.join(offer.kinds)}" if offer.kinds else "no job at all",
            remedy="run it on another node ([job] on), or ask the owner to change the policy",
        )
    mounts = parse_mounts(spec.launch.mounts, allowed=offer.mounts)
    if kind == "container" and spec.job.requirements:
        raise ConfigError(
            "a container has its own packages",
            given=f"requirements = {spec.job.requirements!r}",
            expected="an image that contains what the job needs",
            remedy="leave requirements out of [job], or build them into the image",
        )
    if kind != "container" and spec.launch.mounts:
        raise ConfigError(
            "mounts are for containers only",
            given=f"mounts = {spec.launch.mounts}",
            remedy='set launcher = "container" and an image in [launch], or leave mounts out',
        )
    return mounts


def _check_signed_code(spec: JobSpec, trusted_keys: Sequence[str]) -> None:
    """Raise NotAllowed unless all code that a job brings is in a pack that a trusted key signed."""
    from atoll.node.identity.image_signatures import check_signature, pinned_code

    given = [*spec.launch.env, *spec.launch.secrets]
    loads = [line.partition("=")[0] for line in given if not is_harmless(line.partition("=")[0])]
    script = PurePosixPath(spec.job.script)
    outside = script.is_absolute() or ".." in script.parts or "\\" in spec.job.script
    if not spec.job.code or outside or loads:
        raise NotAllowed(
            "this machine runs signed code only",
            given=f"variables {', '.join(loads)}" if loads else spec.job.script or spec.model.name,
            expected="code from the folder that [job] code names, and no variables that load other",
            remedy="put everything into that folder and sign it: atoll sign code FOLDER --key FILE",
        )
    check_signature(
        pinned_code(spec.job.code), signature=spec.launch.signature, trusted_keys=trusted_keys,
        remedy="sign it with a key that the owner trusts: atoll sign code FOLDER --key FILE",
    )  # fmt: skip
