"""Messages between trainer and writer process: one JSON object per line, over pipes.

trainer -> writer   WriterSetup, then a WriteOrder for every checkpoint
writer -> trainer   Ready; for each order Delivered* (hub only), then Written or Failed;
                    at any time Copied, CopyFailed, WriterIdle
"""

from __future__ import annotations

import msgspec

from atoll.checkpoint.shared_memory import Region
from atoll.errors import WireError


class FolderTarget(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Save to a folder of this machine, or of a file system that the members share."""

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
    """Save to the hub, which publishes, keeps and copies checkpoints."""

    url: str
    token: str
    job: str
    ca: str = ""
    proxy: str = ""
    upload_bps: float = 0.0
    """Upload limit set by the owner of this machine; 0: no limit."""
    pace: str = ""
    """File through which all processes of this machine share that limit."""
    line: str = ""
    """File in which the trainer says when it uses the line, see `LineUse`; empty: nowhere."""
    retry_s: float = 600.0
    """How long an unreachable hub is retried."""


class WriterSetup(msgspec.Struct, frozen=True, tag=True):
    """First message: where checkpoints go. Tokens travel here, not on a command line."""

    target: FolderTarget | HubTarget


class WriteOrder(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Write this checkpoint. A newer order ends an older one's wait for an unreachable hub."""

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
    """A part is at the hub and can be announced."""

    number: int
    name: str
    sha256: str
    nbytes: int


class Written(msgspec.Struct, frozen=True, tag=True):
    """All parts of an order are durable."""

    number: int
    published: bool
    """Whether the checkpoint is complete; for a hub only the announcement says so."""
    nbytes: int
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An order failed; older checkpoints are valid."""

    number: int
    error: dict[str, str]
    superseded: bool = False
    """It was dropped for a newer order."""


class Copied(msgspec.Struct, frozen=True, tag=True):
    """A complete copy of a checkpoint is in the object store."""

    round: int
    nbytes: int
    seconds: float


class CopyFailed(msgspec.Struct, frozen=True, tag=True):
    """A copy failed; it is retried."""

    round: int
    error: dict[str, str]
    pause_s: float


class WriterIdle(msgspec.Struct, frozen=True, tag=True):
    """No copy is pending."""


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
        WireError: the line is not a command.
    """
    try:
        return _commands.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(
            "the writer of checkpoints received no command", given=str(error)
        ) from error


def read_report(data: bytes) -> Report:
    """Return the report in a line.

    Raises:
        WireError: the line is not a report.
    """
    try:
        return _reports.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(
            "unexpected message from the writer of checkpoints", given=str(error)
        ) from error
