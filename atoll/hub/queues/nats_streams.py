"""Queues and topics as JetStream streams.

A queue is a work-queue stream with one durable pull consumer. The server holds the leases: a
fetched message is withheld for `ACK_WAIT_S`, or for the delay of a negative acknowledgement, and
then redelivered; an acknowledgement removes it. A topic is a stream emptied only by limits. Stream
sequence numbers are the item numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.hub.queues.backend import MAX_CLAIM_BYTES
from atoll.hub.queues.nats_client import ANSWER_S, NatsClient
from atoll.wire.messages import QueueEntry

if TYPE_CHECKING:
    from nats.aio.msg import Msg

WINDOW_S = 600.0
"""How long the server recognizes the key of an item."""

ACK_WAIT_S = 60.0
"""First lease of a fetched message: the default of `claim`, which needs no second request then."""

READ_BYTES = 2 * 2**20

_HEADER_BYTES = 64 * 2**10

_IN_FLIGHT = 200

_CONSUMER = "hub"
_NOT_FOUND = 10037
"""JetStream error code: no message with this number."""
_NO_STREAM = 10059
"""JetStream error code: no such stream."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A stored item."""

    seq: int
    key: str
    payload: bytes
    blob: str
    nbytes: int
    put: float


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message delivered by the consumer of a queue."""

    message: StoredMessage
    number: int
    """Consumer sequence number, needed to answer this delivery."""
    count: int


@dataclass(frozen=True, slots=True)
class StreamState:
    """State of one queue or topic on the server."""

    queue: str
    topic: bool
    created: str
    messages: int
    nbytes: int
    last: int
    delivered: int = 0
    """Highest number ever delivered."""
    pending: int = 0


class NatsStreams:
    """The streams of one hub; hubs that share a server use different namespaces."""

    def __init__(self, client: NatsClient) -> None:
        self._client = client

    async def find(self) -> list[StreamState]:
        """Return every queue and topic of this namespace."""
        found: list[StreamState] = []
        offset = 0
        while True:
            answer = await self._client.ask("STREAM.LIST", {"offset": offset})
            for stream in answer.get("streams") or []:
                about = stream["config"].get("metadata") or {}
                ours = about.get("atoll.namespace") == self._client.namespace
                if ours and "atoll.queue" in about:
                    found.append(await self._opened(stream, about))
            offset += len(answer.get("streams") or [])
            if offset >= int(answer.get("total", 0)) or not answer.get("streams"):
                return found

    async def make(self, queue: str, *, topic: bool) -> StreamState:
        """Return the stream of a queue or topic, creating it if missing."""
        name = self._name(queue)
        about = {
            "atoll.namespace": self._client.namespace,
            "atoll.queue": queue,
            "atoll.kind": "topic" if topic else "queue",
        }
        config = {
            "name": name,
            "subjects": [self._subject(queue)],
            "retention": "limits" if topic else "workqueue",
            "storage": "file",
            "discard": "old",
            "num_replicas": 1,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_consumers": -1,
            "duplicate_window": int(WINDOW_S * 1e9),
            "allow_direct": True,
            "metadata": about,
        }
        return await self._opened(await self._client.ask(f"STREAM.CREATE.{name}", config), about)

    async def _opened(self, stream: dict[str, Any], about: dict[str, str]) -> StreamState:
        state, queue = stream["state"], about["atoll.queue"]
        topic = about["atoll.kind"] == "topic"
        consumer: dict[str, Any] = {}
        if not topic:
            consumer = await self._client.ask(
                f"CONSUMER.CREATE.{self._name(queue)}.{_CONSUMER}",
                {
                    "stream_name": self._name(queue),
                    "config": {
                        "durable_name": _CONSUMER,
                        "name": _CONSUMER,
                        "deliver_policy": "all",
                        "replay_policy": "instant",
                        "ack_policy": "explicit",
                        "ack_wait": int(ACK_WAIT_S * 1e9),
                        # The hub counts attempts, because it turns items into dead letters.
                        "max_deliver": -1,
                        "max_ack_pending": -1,
                    },
                },
            )
        return StreamState(
            queue,
            topic,
            str(stream["created"]),
            state["messages"],
            state["bytes"],
            state["last_seq"],
            consumer["delivered"]["stream_seq"] if consumer else 0,
            int(consumer.get("num_pending", 0)),
        )

    async def unsettled(self, queue: str) -> int:
        """Return how many delivered messages are neither acknowledged nor removed."""
        answer = await self._client.ask(f"CONSUMER.INFO.{self._name(queue)}.{_CONSUMER}", {})
        return int(answer["num_ack_pending"])

    async def remove(self, queue: str) -> None:
        """Delete a stream, if it exists."""
        await self._client.ask(f"STREAM.DELETE.{self._name(queue)}", {}, absent=_NO_STREAM)

    # -------------------------------------------------------------------------------- items

    async def publish(
        self, queue: str, entries: Sequence[QueueEntry], *, now: float
    ) -> list[tuple[int, bool]]:
        """Append items in order; return their numbers and whether each was known already."""
        subject = self._subject(queue)
        headers = [_headers(entry, now) for entry in entries]
        acks: list[tuple[int, bool] | None] = [None] * len(entries)

        async def work() -> list[tuple[int, bool]] | None:
            waiting = [
                (
                    place,
                    await self._client.jetstream.publish_async(
                        subject, entry.payload, wait_stall=ANSWER_S, headers=dict(headers[place])
                    ),
                )
                for place, entry in enumerate(entries)
                if acks[place] is None
            ]
            _, late = await asyncio.wait([future for _, future in waiting], timeout=ANSWER_S)
            for future in late:
                future.cancel()
            for place, future in waiting:
                if not future.cancelled() and future.exception() is None:
                    acks[place] = (future.result().seq, bool(future.result().duplicate))
            stored = [ack for ack in acks if ack is not None]
            return stored if len(stored) == len(entries) else None

        return await self._client.patiently("an item was not stored", work)

    async def fetch(self, queue: str, *, limit: int, nbytes: int = 0) -> list[Delivery]:
        """Fetch up to `limit` messages; `nbytes` are payload bytes that the claim has already."""
        most = MAX_CLAIM_BYTES + _HEADER_BYTES - nbytes
        body = json.dumps({"batch": limit, "no_wait": True, "max_bytes": most}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._name(queue)}.{_CONSUMER}"

        async def work() -> list[Delivery] | None:
            nats = self._client.nats
            inbox = nats.new_inbox()
            subscription = await nats.subscribe(inbox)
            found: list[Delivery] = []
            try:
                await nats.publish(subject, body, reply=inbox)
                while len(found) < limit:
                    message = await subscription.next_msg(timeout=ANSWER_S)
                    status = (message.headers or {}).get("Status")
                    if status is not None:
                        # 404, 408, 409: no more messages, or none that fit.
                        return found if status in ("404", "408", "409") else found or None
                    found.append(_delivered(message))
            except TimeoutError:
                if not found:
                    raise  # messages in flight are redelivered after `ACK_WAIT_S`
            finally:
                with contextlib.suppress(Exception):
                    await subscription.unsubscribe()
            return found

        if most <= _HEADER_BYTES:
            return []
        return await self._client.patiently("items were not delivered", work)

    async def ack(self, queue: str, items: Sequence[tuple[int, int]]) -> None:
        """Remove messages, given with their delivery numbers."""
        unanswered = [
            seq
            for (seq, _), answered in zip(
                items, await self._answer_each(queue, items, b"+ACK"), strict=True
            )
            if not answered
        ]
        if unanswered:  # a killed server may not know that it delivered them
            await self.delete(queue, unanswered)

    async def withhold(self, queue: str, items: Sequence[tuple[int, int]], seconds: float) -> None:
        """Redeliver messages after this delay; 0: at once."""
        delay = json.dumps({"delay": max(1, int(seconds * 1e9))})
        body = b"-NAK" if seconds <= 0 else b"-NAK " + delay.encode()
        await self._answer_each(queue, items, body)

    async def _answer_each(
        self, queue: str, items: Sequence[tuple[int, int]], body: bytes
    ) -> list[bool]:
        """Send a reply for each message; return which ones the server confirmed."""
        import nats.errors

        limit = asyncio.Semaphore(_IN_FLIGHT)
        name = self._name(queue)

        async def one(seq: int, delivery: int) -> bool:
            subject = f"$JS.ACK.{name}.{_CONSUMER}.1.{seq}.{delivery}.0.0"
            tries = 0

            async def work() -> bool | None:
                nonlocal tries
                tries += 1
                try:
                    await self._client.nats.request(subject, body, timeout=ANSWER_S)
                except nats.errors.TimeoutError:
                    # The server ignores unknown numbers; a second timeout while connected is
                    # conclusive.
                    return False if tries > 1 and self._client.nats.is_connected else None
                return True

            async with limit:
                return await self._client.patiently("an item was not settled", work)

        return await asyncio.gather(*(one(seq, delivery) for seq, delivery in items))

    async def read(self, queue: str, first: int, *, limit: int) -> list[StoredMessage]:
        """Return up to `limit` items from number `first` on, within `READ_BYTES`."""
        ask = {"seq": max(1, first), "batch": limit, "max_bytes": READ_BYTES}
        return [_decoded(one) for one in await read_messages(self._client, self._name(queue), ask)]

    async def get(self, queue: str, seq: int) -> StoredMessage | None:
        """Return one item, or None if it no longer exists."""
        found = await self.read(queue, seq, limit=1)
        return found[0] if found and found[0].seq == seq else None

    async def delete(self, queue: str, seqs: Sequence[int]) -> None:
        """Remove items, if they exist."""
        name = self._name(queue)
        limit = asyncio.Semaphore(_IN_FLIGHT)

        async def one(seq: int) -> None:
            async with limit:
                await self._client.ask(
                    f"STREAM.MSG.DELETE.{name}", {"seq": seq, "no_erase": True}, absent=_NOT_FOUND
                )

        await asyncio.gather(*(one(seq) for seq in seqs))

    def _name(self, queue: str) -> str:
        digest = hashlib.sha256(f"{self._client.namespace}\0{queue}".encode()).hexdigest()[:32]
        return f"ATOLL_{digest}"

    def _subject(self, queue: str) -> str:
        return f"atoll.{self._name(queue)[6:]}"


async def read_messages(client: NatsClient, stream: str, ask: dict[str, int]) -> list[Msg]:
    """Return the messages of one direct request to a stream."""
    subject, body = f"$JS.API.DIRECT.GET.{stream}", json.dumps(ask).encode()

    async def work() -> list[Msg] | None:
        inbox = client.nats.new_inbox()
        subscription = await client.nats.subscribe(inbox)
        found: list[Msg] = []
        try:
            await client.nats.publish(subject, body, reply=inbox)
            while True:
                message = await subscription.next_msg(timeout=ANSWER_S)
                headers = message.headers or {}
                if "Nats-Sequence" in headers:
                    found.append(message)
                    continue
                ended = headers.get("Status") in ("204", "404")
                return found if ended else None  # otherwise the stream was not ready: retry
        finally:
            with contextlib.suppress(Exception):
                await subscription.unsubscribe()

    return await client.patiently("items were not read", work)


def _headers(entry: QueueEntry, now: float) -> dict[str, str]:
    """Return the headers of an item; the key is hex-encoded because it may hold any character."""
    headers = {"Nats-Msg-Id": entry.key.encode().hex(), "Atoll-Put": repr(now)}
    if entry.blob:
        headers |= {"Atoll-Blob": entry.blob, "Atoll-Bytes": str(entry.nbytes)}
    return headers


def _decoded(message: Msg, seq: int = 0) -> StoredMessage:
    headers = message.headers or {}
    return StoredMessage(
        seq=seq or int(headers["Nats-Sequence"]),
        key=bytes.fromhex(headers.get("Nats-Msg-Id", "")).decode(),
        payload=message.data,
        blob=headers.get("Atoll-Blob", ""),
        nbytes=len(message.data) + int(headers.get("Atoll-Bytes", "0")),
        put=float(headers.get("Atoll-Put", "0")),
    )


def _delivered(message: Msg) -> Delivery:
    about = message.metadata
    return Delivery(
        _decoded(message, about.sequence.stream), about.sequence.consumer, about.num_delivered
    )
