"""What names, options, leases and payloads a queue or topic accepts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from atoll.errors import ConfigError, HubError
from atoll.hub.queues.backend import HeldBlobs
from atoll.wire.messages import QueueEntry, QueueOptions

MAX_PAYLOAD_BYTES = 1 * 2**20
"""Largest payload that is stored in the database; larger ones travel as blobs."""

MAX_PUT = 1_000
"""Items of one message."""

OVERFLOWS = ("reject", "drop-oldest", "wait")

_HASH = re.compile(r"[0-9a-f]{64}")


def check_name(kind: str, name: str) -> None:
    """Refuse names that no queue or key may have.

    Raises:
        HubError: it is empty or longer than 200 characters.
    """
    if not 0 < len(name) <= 200:
        raise HubError(
            f"this {kind} cannot be used",
            given=f"{len(name)} characters",
            expected="1 to 200 characters",
        )


def check_entries(entries: Sequence[QueueEntry]) -> None:
    """Refuse items that cannot be stored.

    Raises:
        HubError: a key, a payload or the number of items cannot be used.
    """
    if not 0 < len(entries) <= MAX_PUT:
        raise HubError(
            "so many items cannot be put at once",
            given=f"{len(entries)} items",
            expected=f"1 to {MAX_PUT}",
        )
    for entry in entries:
        check_name("key", entry.key)
        if len(entry.payload) > MAX_PAYLOAD_BYTES:
            raise HubError(
                "this payload is too large for a message",
                given=f"{len(entry.payload)} bytes",
                expected=f"at most {MAX_PAYLOAD_BYTES} bytes",
                remedy="upload it as a blob and put its SHA-256, as run.queue does",
            )
        if entry.blob and not _HASH.fullmatch(entry.blob):
            raise HubError(
                "this is not the name of a blob",
                given=repr(entry.blob[:80]),
                expected="a SHA-256: 64 digits of 0-9 a-f",
            )


def sized(entries: Sequence[QueueEntry], blobs: HeldBlobs | None) -> Sequence[QueueEntry]:
    """Return items with the true sizes of their blobs.

    Raises:
        HubError: a blob is not here, or nowhere can be.
    """
    if not any(entry.blob or entry.nbytes for entry in entries):
        return entries
    if blobs is None:
        raise HubError("this queue takes no blobs", expected="payloads in the message itself")
    return [
        msgspec.structs.replace(entry, nbytes=blobs.nbytes(entry.blob) if entry.blob else 0)
        for entry in entries
    ]


def check_lease_time(lease_s: float) -> None:
    """Refuse leases that end before they begin.

    Raises:
        HubError: `lease_s` is not a positive, finite number of seconds.
    """
    if not 0 < lease_s < float("inf"):
        raise HubError("a lease must last", given=f"{lease_s} s", expected="more than 0 s")


def check_options(options: QueueOptions) -> None:
    """Refuse options that make no sense.

    Raises:
        ConfigError: names the one.
    """
    for name in ("max_items", "max_bytes", "keep_s"):
        value = getattr(options, name)
        if not 0 <= value < 2**62:
            raise ConfigError(f"{name} of a queue is out of range", given=value, expected=">= 0")
    if not 1 <= options.max_attempts <= 1_000_000:
        raise ConfigError(
            "max_attempts of a queue is out of range", given=options.max_attempts, expected=">= 1"
        )
    if options.overflow not in OVERFLOWS:
        raise ConfigError(
            "unknown overflow of a queue",
            given=repr(options.overflow),
            expected="one of " + ", ".join(OVERFLOWS),
        )


def wrong_kind(name: str, *, topic: bool) -> HubError:
    """Return the error for a queue that is used as a topic, or a topic (`topic`) as a queue."""
    is_, wanted = ("topic", "queue") if topic else ("queue", "topic")
    return HubError(
        f"this is a {is_}",
        given=name,
        expected=f"the name of a {wanted}",
        remedy=f"give the {wanted} another name",
    )
