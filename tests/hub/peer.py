"""A process that talks to a real hub over a real socket, one call at a time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self, TypeVar

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from atoll.hub.server import HubServer
from atoll.wire.chunks import ChunkHead, pack_chunk
from atoll.wire.frames import Kind, Relay, decode, decode_relay, encode_relay
from atoll.wire.limits import HEARTBEAT_S, MAX_FRAME_BYTES, PROTOCOL
from atoll.wire.messages import (
    Beat,
    Envelope,
    Hello,
    Launch,
    Message,
    NodeInfo,
    pack,
    unpack,
)
from tests.patience import PATIENCE_S

M = TypeVar("M", bound=Message)

WAIT_S = PATIENCE_S


@contextlib.contextmanager
def open_socket(hub: HubServer, *, receive_buffer_bytes: int = 0) -> Iterator[ClientConnection]:
    """Yield a WebSocket to the hub; a small receive buffer makes a slow reader felt soon."""
    raw = socket.socket()
    if receive_buffer_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    raw.connect(("127.0.0.1", hub.port))
    with connect(
        f"ws://127.0.0.1:{hub.port}/ws",
        sock=raw,
        compression=None,
        ping_interval=None,
        max_size=MAX_FRAME_BYTES,
        max_queue=1,
        open_timeout=WAIT_S,
        close_timeout=0.2,
    ) as connection:
        yield connection


class Peer:
    """One session. Notices and relayed frames that come while waiting are kept.

    It beats as every process does: a test may take longer than the hub waits for a silent one.
    """

    def __init__(
        self,
        hub: HubServer,
        session: str,
        *,
        token: str = "",
        incarnation: str = "i1",
        info: NodeInfo | None = None,
        receive_buffer_bytes: int = 0,
    ) -> None:
        self.session = session
        self._open = contextlib.ExitStack()
        self.socket = self._open.enter_context(
            open_socket(hub, receive_buffer_bytes=receive_buffer_bytes)
        )
        self.notices: list[Message] = []
        self.relayed: list[Relay] = []
        self.answers: dict[int, Message] = {}
        self._last_id = 0
        self._stats: dict[str, float] = {}
        hello = Hello(PROTOCOL, "test", session, token or hub.operator_token, incarnation, info)
        self.welcome = self.request(hello)
        self._mute = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._mute.set()
        self._open.close()
        self._beats.join()

    def mute(self) -> None:
        """Beat no more, as a process that hangs: the hub hears only what the test sends."""
        self._mute.set()
        self._beats.join()

    def _beat(self) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            while not self._mute.wait(HEARTBEAT_S):
                self.tell(Beat(self._stats))

    def cut(self) -> None:
        """Break the connection without a word, as a cable that is pulled would after a reset."""
        self.socket.socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def ask(self, body: Message) -> int:
        """Send a request; return its id."""
        self._last_id += 1
        self._send(body, self._last_id)
        return self._last_id

    def tell(self, body: Message) -> None:
        self._send(body, 0)

    def _send(self, body: Message, id: int) -> None:
        if isinstance(body, Beat):
            self._stats = body.stats
        self.socket.send(pack(body, id=id))

    def answer(self, id: int, *, timeout_s: float = WAIT_S) -> Message:
        """Wait for the answer to a request."""
        deadline = time.monotonic() + timeout_s
        while id not in self.answers:
            self.read(deadline)
        return self.answers.pop(id)

    def request(self, body: Message, *, timeout_s: float = WAIT_S) -> Message:
        return self.answer(self.ask(body), timeout_s=timeout_s)

    def notice(self, kind: type[M], *, timeout_s: float = WAIT_S) -> M:
        """Wait for a notice of a kind and take it."""
        deadline = time.monotonic() + timeout_s
        while True:
            for body in self.notices:
                if isinstance(body, kind):
                    self.notices.remove(body)
                    return body
            self.read(deadline)

    def relay_from(self, *, timeout_s: float = WAIT_S) -> Relay:
        """Wait for a relayed frame and take it."""
        deadline = time.monotonic() + timeout_s
        while not self.relayed:
            self.read(deadline)
        return self.relayed.pop(0)

    def read(self, deadline: float) -> None:
        """Read one frame; TimeoutError at the deadline, ConnectionClosed when closed."""
        message = self.socket.recv(timeout=max(0.0, deadline - time.monotonic()), decode=False)
        frame = decode(message)
        if frame.kind is Kind.RELAY:
            self.relayed.append(decode_relay(frame))
            return
        envelope: Envelope = unpack(frame)
        if envelope.reply:
            self.answers[envelope.id] = envelope.body
        else:
            self.notices.append(envelope.body)

    def relay(self, to: str, payload: bytes, *, source: str = "") -> int:
        """Send a relay frame; return its bytes."""
        frame = encode_relay(to, source or self.session, payload)
        self.socket.send(frame)
        return len(frame)


def chunk(nbytes: int) -> bytes:
    """Return a chunk as reducers get them."""
    head, piece = pack_chunk(
        ChunkHead("contribute", 1, 0, 0, 1, nbytes, "fp32", [nbytes // 4], 1.0), bytes(nbytes)
    )
    return head + bytes(piece)


NODE = NodeInfo("box", "Linux", "3.11", "test", cores=4, slots=2)

SPEC = """
[job]
name = "{name}"
nodes = {nodes}
min_nodes = {least}
route = "{route}"
"""


def node(hub: HubServer, name: str, *, slots: int = 2, incarnation: str = "i1") -> Peer:
    """Join a machine and connect its agent."""
    assert hub.hub is not None
    address, token = hub.call(hub.hub.stores.auth.redeem(hub.ticket.rpartition("/")[2], name=name))
    info = NodeInfo("box", "Linux", "3.11", "test", cores=4, slots=slots)
    return Peer(hub, address, token=token, incarnation=incarnation, info=info)


def submit(
    hub: HubServer, *, nodes: int, least: int = 0, route: str = "relay", name: str = "j",
    more: str = "",
) -> str:  # fmt: skip
    """Submit a job, with `more` tables in its file; return its id."""
    assert hub.hub is not None
    text = SPEC.format(name=name, nodes=nodes, least=least, route=route) + more
    job = hub.call(hub.hub.stores.jobs.create(text, files={})).job
    hub.call(hub.hub.live.submit(job))
    return job


def member(hub: HubServer, launch: Launch, *, incarnation: str = "i1") -> Peer:
    """Connect as the process that a Launch asks for."""
    session = f"{launch.job}/{launch.member}"
    return Peer(hub, session, token=launch.token, incarnation=incarnation)
