"""What trainer and writer process tell each other: one JSON object per line, over pipes.

trainer -> writer   Setup, then an Order for every checkpoint
writer -> trainer   Ready; for each order Delivered* (hub only), then Written or Failed;
                    at any time Copied, CopyFailed, Idle
"""

from __future__ import annotations

import msgspec

from atoll.checkpoint.shared_memory import Region
from atoll.errors import WireError


class FolderTarget(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Checkpoints go to a folder of this machine, or of a file system that the members share."""

    folder: str
    """The job's folder, `runs/<job>`."""
    job: str = ""
    """Name for the manifest; the folder's by default."""
    keep: int = 2
    keep_every: int = 0
    keep_best: int = 0
    to: str = ""
    """fsspec URL for copies of every complete checkpoint; empty: none."""


class HubTarget(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Checkpoints go to the hub, which publishes, keeps and copies them."""

    url: str
    token: str
    job: str
    ca: str = ""
    proxy: str = ""
    upload_bps: float = 0.0
    """What the owner of this machine lets it send; 0: no limit."""
    pace: str = ""
    """File by which all processes of this machine keep to that together."""
    retry_s: float = 600.0
    """How long a hub that does not answer is tried again."""


class WriterSetup(msgspec.Struct, frozen=True, tag=True):
    """First line: where checkpoints go. Tokens travel here, not on a command line."""

    target: FolderTarget | HubTarget


class WriteOrder(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Write this checkpoint. A newer order ends the wait of an older one for a dead hub."""

    number: int
    round: int
    step: int
    stamp: str
    members: list[str]
    regions: list[Region]
    versions: dict[str, str]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The writer has read its setup."""

    pid: int


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """A part lies at the hub and can be announced."""

    number: int
    name: str
    sha256: str
    nbytes: int


class Written(msgspec.Struct, frozen=True, tag=True):
    """All parts of an order are safe."""

    number: int
    published: bool
    """The checkpoint is complete; at the hub only the announcement tells."""
    nbytes: int
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An order came to nothing; older checkpoints are valid."""

    number: int
    error: dict[str, str]
    superseded: bool = False
    """It was given up for a newer order."""


class Copied(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint lies in the object store, complete."""

    round: int
    nbytes: int
    seconds: float


class CopyFailed(msgspec.Struct, frozen=True, tag=True):
    """A copy did not succeed; it is tried again."""

    round: int
    error: dict[str, str]
    pause_s: float


class WriterIdle(msgspec.Struct, frozen=True, tag=True):
    """No copy is waiting."""


Command = WriterSetup | WriteOrder
Report = Ready | Delivered | Written | Failed | Copied | CopyFailed | WriterIdle

_encoder = msgspec.json.Encoder()
_commands: msgspec.json.Decoder[WriterSetup | WriteOrder] = msgspec.json.Decoder(
    WriterSetup | WriteOrder
)
_reports: msgspec.json.Decoder[
    Ready | Delivered | Written | Failed | Copied | CopyFailed | WriterIdle
] = msgspec.json.Decoder(Ready | Delivered | Written | Failed | Copied | CopyFailed | WriterIdle)


def line(message: Command | Report) -> bytes:
    """Return a message as one line."""
    return _encoder.encode(message) + b"\n"


def read_command(data: bytes) -> Command:
    """Return the command in a line.

    Raises:
        WireError: it is none.
    """
    try:
        return _commands.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError("the writer of checkpoints got no command", given=str(error)) from error


def read_report(data: bytes) -> Report:
    """Return the report in a line.

    Raises:
        WireError: it is none.
    """
    try:
        return _reports.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(
            "the writer of checkpoints said something else", given=str(error)
        ) from error
