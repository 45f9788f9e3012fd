"""Validation of names, options, leases and payloads of queues and topics."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from atoll.errors import ConfigError, HubError
from atoll.hub.queues.backend import HeldBlobs
from atoll.wire.messages import QueueEntry, QueueOptions

MAX_PAYLOAD_BYTES = 1 * 2**20
"""Largest payload stored in the database; larger ones are sent as blobs."""

MAX_PUT = 1_000

OVERFLOWS = ("reject", "drop-oldest", "wait")

_HASH = re.compile(r"[0-9a-f]{64}")


def check_name(kind: str, name: str) -> None:
    """Check that a name has 1 to 200 characters; raises HubError."""
    if not 0 < len(name) <= 200:
        raise HubError(
            f"this {kind} cannot be used",
            given=f"{len(name)} characters",
            expected="1 to 200 characters",
        )


def check_entries(entries: Sequence[QueueEntry]) -> None:
    """Validate items before a put; raises HubError."""
    if not 0 < len(entries) <= MAX_PUT:
        raise HubError(
            "too many items in one put",
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
    """Return items with the actual sizes of their blobs; raises HubError if one is missing."""
    if not any(entry.blob or entry.nbytes for entry in entries):
        return entries
    if blobs is None:
        raise HubError("this queue takes no blobs", expected="payloads in the message itself")
    return [
        msgspec.structs.replace(entry, nbytes=blobs.nbytes(entry.blob) if entry.blob else 0)
        for entry in entries
    ]


def check_lease_time(lease_s: float) -> None:
    """Raise HubError unless `lease_s` is positive and finite."""
    if not 0 < lease_s < float("inf"):
        raise HubError(
            "the duration of a lease is out of range",
            given=f"{lease_s} s",
            expected="more than 0 s",
        )


def check_options(options: QueueOptions) -> None:
    """Raise ConfigError for the first invalid option."""
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
    """Return the error for a queue used as a topic, or a topic (`topic`) used as a queue."""
    is_, wanted = ("topic", "queue") if topic else ("queue", "topic")
    return HubError(
        f"this is a {is_}",
        given=name,
        expected=f"the name of a {wanted}",
        remedy=f"give the {wanted} another name",
    )
