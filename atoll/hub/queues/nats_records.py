"""Records that a hub keeps in NATS besides the items, in one compacted stream.

Options, positions of subscriptions, dead letters and requeued items. The stream keeps the last
record per subject, so it acts as a table that any hub can load.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.hub.queues.nats_client import ANSWER_S, NatsClient
from atoll.hub.queues.nats_streams import READ_BYTES, read_messages
from atoll.wire.messages import QueueOptions

_READ = 1_000


class OptionsRecord(msgspec.Struct, frozen=True, tag="options"):
    """The options of a queue or topic."""

    queue: str
    topic: bool
    options: QueueOptions


class PositionRecord(msgspec.Struct, frozen=True, tag="position"):
    """The acknowledged position of a subscription."""

    queue: str
    subscription: str
    seq: int


class ItemRecord(msgspec.Struct, frozen=True, tag="item"):
    """A dead letter, or (`dead` is false) a requeued item that is not done."""

    queue: str
    seq: int
    dead: bool
    deliveries: int
    """Deliveries so far; attempts of a requeued item are counted from here."""
    delivery: int
    key: str
    nbytes: int
    blob: str
    put: float
    attempt: int
    lease: str
    reason: str


Record = OptionsRecord | PositionRecord | ItemRecord


@dataclass(frozen=True, slots=True)
class _Place:
    stream: str
    subject: str


class NatsRecords:
    """The records of one namespace."""

    def __init__(self, client: NatsClient) -> None:
        self._client = client
        digest = _digest(f"{client.namespace}\0records")
        self._at = _Place(f"ATOLL_{digest}", f"atoll.{digest}")

    async def load(self) -> list[Record]:
        """Return every record; creates the stream if missing."""
        config = {
            "name": self._at.stream,
            "subjects": [f"{self._at.subject}.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "num_replicas": 1,
            "max_msgs_per_subject": 1,
            "allow_direct": True,
            "metadata": {"atoll.namespace": self._client.namespace},
        }
        await self._client.ask(f"STREAM.CREATE.{self._at.stream}", config)
        records: list[Record] = []
        first = 1
        while True:
            ask = {"seq": first, "batch": _READ, "max_bytes": READ_BYTES}
            found = await read_messages(self._client, self._at.stream, ask)
            if not found:
                return records
            for message in found:
                records.append(msgspec.json.decode(message.data, type=Record))
            first = int((found[-1].headers or {})["Nats-Sequence"]) + 1

    async def store(self, record: Record) -> None:
        """Store a record, replacing the previous one."""
        body = msgspec.json.encode(record)

        async def work() -> bool | None:
            answer = await self._client.nats.request(self._subject(record), body, timeout=ANSWER_S)
            kept: dict[str, Any] = json.loads(answer.data)
            return None if "error" in kept else True

        await self._client.patiently("a record was not stored", work)

    async def forget(self, record: ItemRecord) -> None:
        """Remove the record of an item."""
        await self._purge(self._subject(record))

    async def forget_all(self, queue: str) -> None:
        """Remove every record of a queue or topic."""
        await self._purge(f"{self._at.subject}.{_digest(queue)}.>")

    async def _purge(self, subject: str) -> None:
        await self._client.ask(f"STREAM.PURGE.{self._at.stream}", {"filter": subject})

    def _subject(self, record: Record) -> str:
        match record:
            case OptionsRecord():
                name = "options"
            case PositionRecord():
                name = f"position.{_digest(record.subscription)}"
            case ItemRecord():
                name = f"item.{record.seq}"
        return f"{self._at.subject}.{_digest(record.queue)}.{name}"


def _digest(text: str) -> str:
    """Hash a name, because subjects reserve some characters."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
