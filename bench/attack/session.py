"""Sessions with a hub of a process that may lie, and what is read until the other side closes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from atoll.wire.frames import Kind, decode, decode_relay, encode_relay
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import Beat, Failure, Hello, Message, NodeInfo, Welcome, pack, unpack

WAIT_S = 120.0
"""A bound that only guards against hanging."""

INFO = NodeInfo("mallory", "Linux", "3.11", "0.1.0", cores=4, slots=1)

Found = TypeVar("Found", bound=Message)


class Session:
    """One session, of a process that may lie."""

    def __init__(
        self, opened: ClientConnection, address: str, token: str, *, incarnation: str = "m1"
    ) -> None:
        """Say Hello; `answer` is what the hub says to it."""
        self.opened, self.address = opened, address
        self._id = 1
        info = INFO if "/" not in address else None
        hello = Hello(PROTOCOL, "test", address, token, incarnation, info)
        self.notices: list[Message] = []
        self.relayed: list[tuple[str, bytes]] = []
        """Source and payload of every relay frame that has come."""
        opened.send(pack(hello, id=1))
        self.answer = self._answer(1)

    @property
    def welcome(self) -> bool:
        """Whether the hub took it in."""
        return isinstance(self.answer, Welcome)

    def ask(self, body: Message, *, wait_s: float = WAIT_S) -> Message:
        """Send a request and return its answer."""
        self._id += 1
        self.opened.send(pack(body, id=self._id))
        return self._answer(self._id, wait_s=wait_s)

    def got(self, body: Message, kind: type[Found]) -> Found:
        """Send a request whose answer must be of this kind."""
        found = self.ask(body)
        if not isinstance(found, kind):
            raise TypeError(f"{type(body).__name__} was answered with {found}")
        return found

    def say(self, body: Message) -> None:
        """Send a notice."""
        self.opened.send(pack(body))

    def relay(self, to: str, *parts: Any) -> None:
        """Send bytes to another session."""
        self.opened.send(encode_relay(to, self.address, *parts))

    def hear(self, condition: Callable[[], Any], *, wait_s: float = WAIT_S) -> Any:
        """Take what comes until a condition holds; return it. TimeoutError if it does not."""
        deadline = time.monotonic() + wait_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError("what was waited for did not come")
            self._take(min(1.0, wait_s))
        return found

    def _answer(self, id: int, *, wait_s: float = WAIT_S) -> Message:
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            found = self._take(1.0, id=id)
            if found is not None:
                return found
        raise TimeoutError(f"no answer within {wait_s:.0f} s")

    def _take(self, wait_s: float, *, id: int = 0) -> Message | None:
        """Take one message; return it if it is the answer to a request."""
        try:
            frame = decode(self.opened.recv(timeout=wait_s, decode=False))
        except TimeoutError:
            self.say(Beat(time=time.time()))
            return None
        if frame.kind is Kind.RELAY:
            found = decode_relay(frame)
            self.relayed.append((found.source, bytes(found.payload)))
            return None
        envelope = unpack(frame)
        refused = isinstance(envelope.body, Failure) and envelope.id == 0
        if refused or (envelope.reply and envelope.id == id):
            return envelope.body
        self.notices.append(envelope.body)
        return None


def said_and_closed(opened: ClientConnection, *, wait_s: float = WAIT_S) -> list[Message]:
    """Return what the hub says until it closes."""
    found: list[Message] = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            frame = decode(opened.recv(timeout=wait_s, decode=False))
            if frame.kind is Kind.CONTROL:
                found.append(unpack(frame).body)
    return found


def read_to_end(opened: socket.socket, *, wait_s: float = WAIT_S) -> bytes:
    """Return everything until the other side closes; TimeoutError when it does not."""
    opened.settimeout(wait_s)
    found = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while block := opened.recv(65_536):
            found += block
    return found


def until(condition: Callable[[], Any], what: str, *, wait_s: float = WAIT_S) -> Any:
    """Wait until a condition holds and return it; TimeoutError says what did not happen."""
    deadline = time.monotonic() + wait_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {wait_s:.0f} s")
        time.sleep(0.1)
    return found
