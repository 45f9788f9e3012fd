"""Messages between the members of a job whose model has paths, and the hub's ledger of paths.

A *phase* is the steps between two rounds. A member asks for its *turn* in a phase: the paths that
it trains one after the other, and the donors of modules that it does not hold. Then it reports that
it has trained them; once all members have, each module's holders meet in a round.

All requests may be repeated at any time.
"""

from __future__ import annotations

import math

import msgspec

from atoll.wire.message import Finite, Message, Number


class PathReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a member has done with a path in a phase."""

    path: Number
    step: Number = 0
    """Step that the path has reached."""
    tokens: Number = 0
    """Tokens of this phase."""
    loss: Finite | None = None
    """Mean training loss of this phase."""
    held_out: Finite | None = None
    """Loss on the path's own held-out data at the beginning of this phase."""
    measured: Number = 0
    """Step at which `held_out` was measured."""
    exported: bool = False
    """The path's weights are at the hub, as of the end of the run."""


def usable_loss(loss: float | None) -> float | None:
    """Return a loss as a report may have it: None if the path has diverged."""
    return loss if loss is not None and math.isfinite(loss) else None


class PathShard(msgspec.Struct, frozen=True, array_like=True):
    """The training data of a path."""

    documents: Number
    tokens: Number


class PathAsk(Message, frozen=True):
    """A member asks for its next turn; answered when there is one, or after some seconds."""

    phase: Number = -1
    """Phase that it is ready for; -1: it has had no turn."""
    lost: bool = False
    """It lost the work of its last turn."""
    phases: Number = 0
    """Phases of the whole run, which follow from the job."""
    held: dict[Number, Number] = {}
    """Modules that it holds as of the last round, and the rounds of each."""
    versions: dict[Number, Number] = {}
    """Their versions, see `PathTurn`."""
    process: str = ""
    """Differs from that of every earlier process of this member."""
    shards: list[PathShard] = []
    """Of every path, for people; only in the first request of a process."""


class PathTurn(Message, frozen=True):
    """Answer to `PathAsk`."""

    phase: Number = -1
    """-1: not yet, ask again."""
    paths: list[Number] = []
    """Paths to train one after the other, ascending."""
    rounds: dict[Number, Number] = {}
    """Modules of these paths, and the rounds that their holders have committed."""
    versions: dict[Number, Number] = {}
    """Changes when a module is restored from a checkpoint: copies of other versions are invalid."""
    donors: dict[Number, list[str]] = {}
    """Module -> members to fetch it from. A module that is absent is in the request's `held`, or no
    member has it and it comes from the checkpoint."""
    serves: dict[str, list[str]] = {}
    """host:port at which donors serve their state; donors not named serve it through the hub."""
    checkpoint: Number = -1
    """The newest complete checkpoint; -1: none, modules without a holder start from the seed."""
    save: list[Number] = []
    """Modules that this member saves for the checkpoint of this phase."""
    history: Number = 0
    """Changes when all members go back to a checkpoint."""
    best: dict[Number, Finite] = {}
    """Least loss of each of these paths on its own held-out data so far."""
    last: bool = False
    """Nothing is left to train: export these paths."""
    over: bool = False
    """The run is over."""
    stopped: bool = False
    """It ends because it was asked to stop."""


class PathTrained(Message, frozen=True):
    """A member has trained its paths; answered once the others have, or after some seconds."""

    phase: Number
    reports: list[PathReport] = []
    held: dict[Number, Number] = {}
    """Modules that it holds as of the last round, and the rounds of each."""
    versions: dict[Number, Number] = {}
    """See `PathAsk`."""


class PathMeeting(Message, frozen=True):
    """Answer to `PathTrained`."""

    meet: bool = False
    """All members have trained: the holders of each module meet now."""
    void: bool = False
    """This phase is over, or the member has no paths in it any more: ask for a turn."""
