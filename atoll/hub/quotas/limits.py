"""The quotas of a hub: their kinds, their defaults, and `quotas.toml`."""

from __future__ import annotations

import dataclasses
import enum
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.config.sizes import parse_size
from atoll.errors import ConfigError, unknown

FILE = "quotas.toml"
MOST = 10**18


class Kind(enum.StrEnum):
    """What is limited; the value is the name in `quotas.toml` and on the command line."""

    JOB_DISK = "job_disk"
    DISK = "disk"
    QUEUE = "queue"
    JOB_QUEUES = "job_queues"
    BLOBS = "blobs"
    BLOB_BYTES = "blob_bytes"
    CONNECTIONS = "connections"
    FRAMES = "frames_per_s"
    REQUESTS = "requests_per_s"
    REDUCER_MEMBER = "reducer_member"
    REDUCER_JOB = "reducer_job"

    @property
    def in_bytes(self) -> bool:
        """Whether it counts bytes."""
        return self not in (Kind.BLOBS, Kind.CONNECTIONS, Kind.FRAMES, Kind.REQUESTS)

    @property
    def text(self) -> str:
        """What it counts, for people."""
        return _TEXTS[self]

    @property
    def of_token(self) -> bool:
        """Whether a ticket may set it for the nodes and logins that are created with it."""
        return self in _OF_TOKEN


_TEXTS = {
    Kind.JOB_DISK: "bytes on the hub's disk of one job",
    Kind.DISK: "bytes on the hub's disk of all jobs of one login",
    Kind.QUEUE: "bytes in one queue or topic",
    Kind.JOB_QUEUES: "bytes in all queues and topics of one job",
    Kind.BLOBS: "number of blobs of one token",
    Kind.BLOB_BYTES: "bytes in the blobs of one token",
    Kind.CONNECTIONS: "open connections of one token",
    Kind.FRAMES: "frames per second of one session",
    Kind.REQUESTS: "frames per second of all connections and requests of one token",
    Kind.REDUCER_MEMBER: "bytes in the memory of a reducer for one member",
    Kind.REDUCER_JOB: "bytes in the memory of a reducer for its job",
}
_OF_TOKEN = frozenset(
    {
        Kind.JOB_DISK,
        Kind.DISK,
        Kind.JOB_QUEUES,
        Kind.BLOBS,
        Kind.BLOB_BYTES,
        Kind.CONNECTIONS,
        Kind.REQUESTS,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """How much one may use; 0: no limit. The defaults stop accidents and floods, not work."""

    job_disk: int = 10**12
    """Bytes: job file, checkpoints, artifacts, metrics, events, and stored output."""
    disk: int = 4 * 10**12
    """Bytes: the sum over the jobs that were submitted with one login."""
    queue: int = 64 * 2**30
    """Bytes: items that are not done, their blobs included; a queue's own `max_bytes` may be
    smaller."""
    job_queues: int = 256 * 2**30
    """Bytes: the same over all queues with the same first part of their name."""
    blobs: int = 100_000
    blob_bytes: int = 512 * 2**30
    connections: int = 4_096
    frames_per_s: int = 2_000
    """In the long run; as many may come at once."""
    requests_per_s: int = 4_000
    """The same over all connections and requests of a token, except an operator's; a request by
    HTTP counts as 16 frames."""
    reducer_member: int = 16 * 2**30
    """Bytes: contributions that wait for those of others."""
    reducer_job: int = 64 * 2**30

    def of(self, kind: Kind) -> int:
        """Return the limit of a kind; 0: none."""
        return int(getattr(self, kind.value))


DEFAULT_QUOTAS = Quotas()


def read_quotas(path: Path, *, needed: bool = False) -> Quotas:
    """Return the quotas of a file like `job_disk = "500GB"`.

    Without a file they are the defaults, unless it is `needed`.

    Raises:
        ConfigError: the file is not TOML, or a name or value is wrong.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        if isinstance(error, FileNotFoundError) and not needed:
            return DEFAULT_QUOTAS
        raise ConfigError(
            "the quotas cannot be read",
            given=f"{path} ({error})",
            expected='lines such as job_disk = "500GB"',
        ) from error
    return dataclasses.replace(DEFAULT_QUOTAS, **checked(found))


def parse_quotas(texts: Iterable[str]) -> dict[str, int]:
    """Return limits from texts like `disk=10GB` or `connections=20`; raises ConfigError."""
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError("this is not a quota", given=repr(text), expected="e.g. disk=10GB")
        name, value = name.strip(), value.strip()
        found[name] = int(value) if value.isdecimal() else value
    return checked(found, of_token=True)


def checked(values: Mapping[str, object], *, of_token: bool = False) -> dict[str, int]:
    """Return limits by name, sizes as bytes; with `of_token` only those that a ticket may set.

    Raises:
        ConfigError: a name is unknown, or a value is not a limit.
    """
    kinds = {kind.value: kind for kind in Kind if kind.of_token or not of_token}
    limits = {}
    for name, value in values.items():
        kind = kinds.get(name)
        if kind is None:
            raise unknown("quota", name, kinds)
        if isinstance(value, str) and kind.in_bytes:
            value = parse_size(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
            raise ConfigError(
                f"the quota {name} is not a limit",
                given=repr(value),
                expected='a size such as "500GB", or 0 for no limit'
                if kind.in_bytes
                else "a number, or 0 for no limit",
            )
        limits[name] = value
    return limits
