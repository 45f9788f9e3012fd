"""Everything Atoll raises on purpose.

    AtollError
    ├── ConfigError            a setting, name or file a person wrote is wrong
    ├── DataError              a corpus is empty, too small or unreadable
    ├── WireError              bytes that do not obey the protocol
    │   ├── FrameTooLarge
    │   └── VersionMismatch
    ├── HubError               the hub refused or could not be reached
    │   ├── HubUnreachable
    │   ├── AuthError
    │   │   ├── Revoked
    │   │   └── WrongCode
    │   ├── PortTaken
    │   ├── QueueFull
    │   ├── LimitReached
    │   └── LeaseEnded
    ├── GroupError             members could not agree
    │   ├── PeerLost
    │   ├── PeerRefused
    │   ├── EpochChanged
    │   ├── LeftBehind
    │   ├── GroupLeft
    │   └── DeadlineExceeded
    ├── CheckpointError
    │   ├── CheckpointCorrupt
    │   └── CheckpointMissing
    ├── StorageFull            no room left on a disk
    ├── NotAllowed             the owner of a machine does not allow that to a job
    ├── JobError               a job failed; carries node and traceback
    │   ├── ScriptError
    │   ├── LossNotFinite
    │   ├── OutOfMemory
    │   └── RankLost           of an island
    ├── PlanError              no machines fit
    └── FitError               no scaling law can be fitted to these runs
        ├── TooFewPoints
        ├── OneValueOnly       e.g. all runs have the same size
        ├── PointNotFinite
        └── RunsContradict

Each says what failed, what was given, what was expected and what to do, in that order.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AtollError(Exception):
    """Base of every error Atoll raises on purpose.

    Args:
        what: What failed, as a short clause.
        given: What was given, shown as it was written.
        expected: What would have been right.
        remedy: What the person can do now.
    """

    #: Exit status of the command line when this error ends it.
    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        given: object = None,
        expected: str | None = None,
        remedy: str | None = None,
    ) -> None:
        """Build the message from its four parts; absent parts are left out."""
        self.what = what
        self.given = given
        self.expected = expected
        self.remedy = remedy
        super().__init__(self.message())

    def message(self) -> str:
        """Return the whole message on one line."""
        parts = [self.what]
        if self.given is not None:
            parts.append(f"given: {self.given}")
        if self.expected is not None:
            parts.append(f"expected: {self.expected}")
        if self.remedy is not None:
            parts.append(f"what to do: {self.remedy}")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, str]:
        """Return a plain form that crosses the wire (see :func:`from_dict`)."""
        fields = {"kind": type(self).__name__, "what": self.what}
        for name in ("given", "expected", "remedy"):
            value = getattr(self, name)
            if value is not None:
                fields[name] = str(value)
        return fields


class ConfigError(AtollError):
    """A setting, a name or a file that a person wrote is wrong."""

    exit_code = 2


class DataError(AtollError):
    """A corpus is empty, too small or unreadable."""


class WireError(AtollError):
    """Bytes that do not obey the protocol."""


class FrameTooLarge(WireError):
    """A frame is larger than its limit."""


class VersionMismatch(WireError):
    """The two sides speak different versions of the protocol."""


class HubError(AtollError):
    """The hub refused, or could not be reached."""


class HubUnreachable(HubError):
    """No hub answers at the address."""


class AuthError(HubError):
    """A ticket or token is unknown, expired or used up."""


class Revoked(AuthError):
    """An operator has revoked this machine or login."""


class WrongCode(AuthError):
    """A pairing code is wrong."""


class PortTaken(HubError):
    """Another program listens on the port."""


class QueueFull(HubError):
    """A queue has no room for what was put into it."""


class LimitReached(HubError):
    """A token, node or job uses all that the hub lets it use; what was stored stays."""


class LeaseEnded(HubError):
    """An item's lease has ended, e.g. while a computer slept: the item is delivered again."""


class GroupError(AtollError):
    """Members could not agree."""


class PeerLost(GroupError):
    """A member or the reducer went away before its part was complete."""


class PeerRefused(GroupError):
    """Another member or the reducer sent something unusable; the error names the sender."""


class EpochChanged(GroupError):
    """The plan of this round was replaced by another."""


class LeftBehind(GroupError):
    """The group committed rounds without this member."""


class GroupLeft(GroupError):
    """This member has left the group for good, e.g. on a preemption notice."""


class DeadlineExceeded(GroupError):
    """A wait ended at its deadline."""


class CheckpointError(AtollError):
    """A checkpoint could not be written or read."""


class CheckpointCorrupt(CheckpointError):
    """A part of a checkpoint is truncated or its hash differs; the part is named."""


class CheckpointMissing(CheckpointError):
    """There is no complete checkpoint where one was asked for."""


class StorageFull(AtollError):
    """No room is left on a disk; what was there before stays valid."""


class NotAllowed(AtollError):
    """The owner of a machine does not allow that to a job."""


class JobError(AtollError):
    """A job failed."""


class ScriptError(JobError):
    """The user's own script raised."""


class LossNotFinite(JobError):
    """A loss or a gradient became NaN or infinite; the update was refused."""


class OutOfMemory(JobError):
    """A worker ran out of memory."""


class RankLost(JobError):
    """A rank of an island was lost, which ends the work of all its ranks."""


class PlanError(AtollError):
    """No machines fit what a job needs."""


class FitError(AtollError):
    """No scaling law can be fitted to these runs."""


class TooFewPoints(FitError):
    """There are fewer runs than the law has constants, and one more to check it."""


class OneValueOnly(FitError):
    """The runs have too few different values of what the law is about."""


class PointNotFinite(FitError):
    """A run's loss or size is NaN, infinite, or not above zero; the run is named."""


class RunsContradict(FitError):
    """Runs that should agree do not, or the loss rises where a law says that it falls."""


def unknown(kind: str, given: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that no table has, naming the nearest known one.

    Args:
        kind: What is being named, e.g. ``"codec"`` or ``"key in [train]"``.
        given: The name as it was written.
        known: Every name that would have been right.
    """
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    return ConfigError(
        f"unknown {kind}",
        given=repr(given),
        expected="one of " + ", ".join(names) if names else "nothing here",
        remedy=f"did you mean {near[0]!r}?" if near else None,
    )


def from_dict(fields: dict[str, str]) -> AtollError:
    """Rebuild an error that crossed the wire.

    An unknown kind becomes an `AtollError`, and one with a constructor of its own its base class.
    """
    kinds: dict[str, type[AtollError]] = {}
    todo: list[type[AtollError]] = [AtollError]
    while todo:
        cls = todo.pop()
        kinds[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    kind = kinds.get(fields.get("kind", ""), AtollError)
    while kind.__init__ is not AtollError.__init__:
        kind = next(base for base in kind.__bases__ if issubclass(base, AtollError))
    return kind(
        fields.get("what", "the peer failed without giving a reason"),
        given=fields.get("given"),
        expected=fields.get("expected"),
        remedy=fields.get("remedy"),
    )
