"""Items in NATS JetStream: one stream per queue or topic, its numbers are the items' numbers.

The hub uses streams as ordered, durable logs and nothing else of JetStream: no consumers. Who holds
which item is written in the hub's own book, so leases, attempts and dead letters are the same with
every backend.

A server that is away is waited for, up to `PATIENCE_S`; what is sent again is known by its key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from atoll.errors import ConfigError, HubError
from atoll.wire.messages import QueueEntry

if TYPE_CHECKING:
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 30.0
"""How long a request waits for a server that is away."""

ANSWER_S = 5.0
WINDOW_S = 600.0
"""How long the server knows keys."""

READ_BYTES = 2 * 2**20
"""Payload bytes of one read."""

OLDEST_SERVER = (2, 11)
_IN_FLIGHT = 200
_NOT_FOUND = 10037
"""Error code of JetStream: there is no message with this number."""
_NO_STREAM = 10059
"""The same: there is no such stream."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One stored item."""

    seq: int
    key: str
    payload: bytes
    blob: str
    nbytes: int
    put: float


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the server tells of one stream."""

    queue: str
    created: str
    messages: int
    nbytes: int
    last: int


class NatsStore:
    """The streams of one hub at one server or cluster.

    Args:
        url: `nats://[USER:PASSWORD@]HOST:PORT[/NAMESPACE]`, or ws:// and wss://; hubs that share a
            server have different namespaces.

    Raises:
        ConfigError: the URL has another form, or the package for NATS is not installed.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("nats", "tls", "ws", "wss") or not parts.hostname:
            raise ConfigError(
                "this is not the address of a NATS server",
                given=url,
                expected="nats://HOST:PORT",
            )
        self.namespace = parts.path.strip("/") or "atoll"
        self._shown = f"{parts.scheme}://{parts.hostname}:{parts.port or 4222}"
        self._server = url.removesuffix(parts.path) if parts.path else url
        self._nats: Any = None
        self._js: Any = None
        self._known: set[str] = set()

    async def connect(self) -> None:
        """Connect; from then on the connection keeps itself.

        Raises:
            ConfigError: the package for NATS is not installed, or the server is too old.
            HubError: nobody answers there.
        """
        try:
            import nats
        except ImportError as error:
            raise ConfigError(
                "queues in NATS need a package that is not installed",
                given="nats-py",
                remedy="pip install 'atoll[nats]'",
            ) from error
        try:
            await self._knock()
            self._nats = await asyncio.wait_for(
                nats.connect(
                    self._server,
                    connect_timeout=3,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,
                    ping_interval=10,
                    pending_size=64 * 2**20,
                    error_cb=_noted,
                ),
                ANSWER_S,
            )
        except (OSError, TimeoutError, nats.errors.Error) as error:
            raise HubError(
                "the queue server does not answer",
                given=f"{self._shown} ({error or type(error).__name__})",
                expected="a NATS server with JetStream",
                remedy="start it (`nats-server -js`), or start the hub without --queue",
            ) from error
        version = self._nats.connected_server_version
        if (version.major, version.minor) < OLDEST_SERVER:
            raise ConfigError(
                "the NATS server is too old",
                given=f"{version.major}.{version.minor} at {self._shown}",
                expected=f"at least {OLDEST_SERVER[0]}.{OLDEST_SERVER[1]}",
            )
        self._js = self._nats.jetstream(timeout=ANSWER_S, publish_async_max_pending=100_000)

    async def _knock(self) -> None:
        """Raise at once when nobody listens: the client would try for ever."""
        parts = urlsplit(self._server)
        host, port = parts.hostname, parts.port or 4222
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), ANSWER_S)
        writer.close()

    async def close(self) -> None:
        """Close the connection."""
        if self._nats is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._nats.close(), 2.0)

    # ------------------------------------------------------------------------- streams

    async def streams(self) -> list[StreamState]:
        """Return every stream of this namespace."""
        found: list[StreamState] = []
        offset = 0
        while True:
            answer = await self._ask("STREAM.LIST", {"offset": offset})
            for stream in answer.get("streams") or []:
                about = stream["config"].get("metadata") or {}
                if about.get("atoll.namespace") == self.namespace:
                    found.append(_state(stream, about["atoll.queue"]))
                    self._known.add(about["atoll.queue"])
            offset += len(answer.get("streams") or [])
            if offset >= int(answer.get("total", 0)) or not answer.get("streams"):
                return found

    async def make(self, queue: str) -> StreamState:
        """Return the stream of a queue, made if there is none."""
        name = self._name(queue)
        config = {
            "name": name,
            "subjects": [self._subject(queue)],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "num_replicas": 1,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_consumers": -1,
            "duplicate_window": int(WINDOW_S * 1e9),
            "allow_direct": True,
            "metadata": {"atoll.namespace": self.namespace, "atoll.queue": queue},
        }
        answer = await self._ask(f"STREAM.CREATE.{name}", config)
        self._known.add(queue)
        return _state(answer, queue)

    async def remove(self, queue: str) -> None:
        """Delete the stream of a queue with everything in it; one that is gone does not matter."""
        await self._ask(f"STREAM.DELETE.{self._name(queue)}", {}, absent=_NO_STREAM)
        self._known.discard(queue)

    # --------------------------------------------------------------------------- items

    async def publish(
        self, queue: str, entries: Sequence[QueueEntry], *, now: float
    ) -> list[tuple[int, bool]]:
        """Append items in order; return their numbers, and whether each was there already."""
        if queue not in self._known:
            await self.make(queue)
        subject = self._subject(queue)
        heads = [_head(entry, now) for entry in entries]
        acks: list[tuple[int, bool] | None] = [None] * len(entries)

        async def work() -> list[tuple[int, bool]] | None:
            waiting = [
                (
                    place,
                    await self._js.publish_async(
                        subject, entry.payload, wait_stall=ANSWER_S, headers=dict(heads[place])
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

        return await self._patiently("an item was not stored", work)

    async def read(self, queue: str, first: int, *, limit: int) -> list[StoredMessage]:
        """Return up to `limit` items with numbers from `first` on, as one answer holds them."""
        ask = json.dumps({"seq": max(1, first), "batch": limit, "max_bytes": READ_BYTES})
        subject = f"$JS.API.DIRECT.GET.{self._name(queue)}"

        async def work() -> list[StoredMessage] | None:
            inbox = self._nats.new_inbox()
            subscription = await self._nats.subscribe(inbox)
            found: list[StoredMessage] = []
            try:
                await self._nats.publish(subject, ask.encode(), reply=inbox)
                while True:
                    message = await subscription.next_msg(timeout=ANSWER_S)
                    headers = message.headers or {}
                    if "Nats-Sequence" in headers:
                        found.append(_kept(message))
                        continue
                    ended = headers.get("Status") in ("204", "404")
                    return found if ended else None  # else it was not ready: ask again
            finally:
                with contextlib.suppress(Exception):
                    await subscription.unsubscribe()

        return await self._patiently("items were not read", work)

    async def get(self, queue: str, seq: int) -> StoredMessage | None:
        """Return one item, or None if it is not there any more."""
        found = await self.read(queue, seq, limit=1)
        return found[0] if found and found[0].seq == seq else None

    async def delete(self, queue: str, seqs: Sequence[int]) -> None:
        """Remove items for good; those that are gone already do not matter."""
        name = self._name(queue)
        limit = asyncio.Semaphore(_IN_FLIGHT)

        async def one(seq: int) -> None:
            async with limit:
                await self._ask(
                    f"STREAM.MSG.DELETE.{name}", {"seq": seq, "no_erase": True}, absent=_NOT_FOUND
                )

        await asyncio.gather(*(one(seq) for seq in seqs))

    # -------------------------------------------------------------------------- inside

    def _name(self, queue: str) -> str:
        digest = hashlib.sha256(f"{self.namespace}\0{queue}".encode()).hexdigest()[:32]
        return f"ATOLL_{digest}"

    def _subject(self, queue: str) -> str:
        return f"atoll.{self._name(queue)[6:]}"

    async def _ask(self, verb: str, body: dict[str, Any], *, absent: int = 0) -> dict[str, Any]:
        """Return the answer of the server's own interface; the error `absent` is none."""

        async def work() -> dict[str, Any] | None:
            message = await self._nats.request(
                f"$JS.API.{verb}", json.dumps(body).encode(), timeout=ANSWER_S
            )
            answer: dict[str, Any] = json.loads(message.data)
            error = answer.get("error")
            if error is None or error.get("err_code") == absent:
                return answer
            if error.get("code") == 503:
                return None  # it has just started
            raise HubError("the queue server refused", given=f"{verb}: {error.get('description')}")

        return await self._patiently(f"{verb.partition('.ATOLL')[0]} was not answered", work)

    async def _patiently(self, what: str, work: Callable[[], Awaitable[T | None]]) -> T:
        """Return what `work` returns, tried again while the server is away or returns None.

        Raises:
            HubError: the server stays away.
        """
        import nats.errors

        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + PATIENCE_S, 0.05
        while True:
            try:
                found = await work()
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.info("nats: %s: %s", what, error or type(error).__name__)
                found = None
            if found is not None:
                return found
            if loop.time() > deadline:
                raise HubError(
                    "the queue server is away",
                    given=f"{self._shown}: {what} within {PATIENCE_S:g} s",
                    remedy="see whether it runs; what was acknowledged is safe",
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)


async def _noted(error: Exception) -> None:
    """Note what the connection tells of itself; it repairs itself."""
    log.info("nats: %s", error or type(error).__name__)


def _head(entry: QueueEntry, now: float) -> dict[str, str]:
    """Return the headers of an item; keys may hold any character."""
    head = {"Nats-Msg-Id": entry.key.encode().hex(), "Atoll-Put": repr(now)}
    if entry.blob:
        head |= {"Atoll-Blob": entry.blob, "Atoll-Bytes": str(entry.nbytes)}
    return head


def _kept(message: Msg) -> StoredMessage:
    head = message.headers or {}
    blob = head.get("Atoll-Blob", "")
    return StoredMessage(
        seq=int(head["Nats-Sequence"]),
        key=bytes.fromhex(head.get("Nats-Msg-Id", "")).decode(),
        payload=message.data,
        blob=blob,
        nbytes=len(message.data) + int(head.get("Atoll-Bytes", "0")),
        put=float(head.get("Atoll-Put", "0")),
    )


def _state(stream: dict[str, Any], queue: str) -> StreamState:
    state = stream["state"]
    return StreamState(
        queue, str(stream["created"]), state["messages"], state["bytes"], state["last_seq"]
    )
