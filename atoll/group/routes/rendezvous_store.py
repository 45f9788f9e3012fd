"""The rendezvous of members with direct connections: probing, and the store that Gloo requires.

Every member of a process group stores a few hundred bytes and waits for those of the others; the
store of any member can serve them. torch's TCPStore resolves the name of every address that it
connects to, which stalls for many seconds without a name server, and waits in it cannot be
cancelled; here a wait ends when its socket is closed.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from urllib.parse import urlsplit

import msgspec
import torch.distributed

from atoll.clock import RealClock
from atoll.errors import (
    AuthError,
    ConfigError,
    DeadlineExceeded,
    HubUnreachable,
    PeerLost,
    WireError,
)
from atoll.group.routes.member_lines import Line, MemberLines
from atoll.net.accepting import accepted, serve_on_thread, stop_listening

PROBE_TIMEOUT_S = 2.0


def own_address(url: str) -> str:
    """Return this machine's local address on the route to the hub; nothing is sent.

    Other members that reach the hub over the same network can most likely connect to it, even if
    this machine's hostname resolves to another address. `url` is the hub's, http://HOST:PORT.

    Raises:
        ConfigError: the URL names no host.
        HubUnreachable: there is no route to the host.
    """
    parts = urlsplit(url)
    if not parts.hostname:
        raise ConfigError("the hub's URL names no host", given=url, expected="http://HOST:PORT")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HubUnreachable("there is no route to the hub", given=f"{url} ({error})") from error


def join_host_port(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(dial: str) -> tuple[str, int]:
    """Return the two parts of ``host:port``; raises ConfigError if it is no address."""
    host, _, port = dial.rpartition(":")
    try:
        number = int(port) if port.isascii() and port.isdigit() else 0
        host.encode("idna")  # a socket would raise UnicodeError, which is no OSError
    except ValueError:
        number = 0
    if not host or not 0 < number < 65_536:
        raise ConfigError("this is not an address", given=dial, expected="HOST:PORT")
    return host.strip("[]"), number


def answers(dial: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Return whether ``host:port`` accepts a TCP connection."""
    try:
        with socket.create_connection(split_host_port(dial), timeout=timeout_s):
            return True
    except (OSError, ConfigError):
        return False


def probe_peers(
    dials: Mapping[str, Sequence[str]], *, timeout_s: float = PROBE_TIMEOUT_S
) -> list[str]:
    """Return the members with an address that accepts connections; probes all in parallel."""
    addresses = [(member, dial) for member, entries in dials.items() for dial in entries]
    if not addresses:
        return []
    with ThreadPoolExecutor(
        max_workers=min(32, len(addresses)), thread_name_prefix="probe"
    ) as pool:
        found = pool.map(lambda pair: answers(pair[1], timeout_s=timeout_s), addresses)
        reached = {member for (member, _), answer in zip(addresses, found, strict=True) if answer}
    return [member for member in dials if member in reached]


MAX_NOTE_BYTES = 64 * 1024
"""Largest value; Gloo's grow by about 60 bytes with every member."""
MAX_NOTES = 1024
"""Values that a store keeps; the oldest are dropped."""
MAX_READERS = 256
"""Concurrent connections of a store."""
IDLE_S = 30.0
"""Seconds after which an idle connection is closed."""


class StoreRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to a store."""

    key: str
    value: bytes | None
    """Value to store; None: wait for it."""
    wait_s: float = 0.0


class StoreAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A store's answer."""

    value: bytes | None
    """The stored value; None: not stored in time."""


_asks = msgspec.msgpack.Decoder(StoreRequest)
_answers = msgspec.msgpack.Decoder(StoreAnswer)


class StoreServer:
    """Stores and serves values of one job's members, on its own threads."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of one numeric address only."""
        self.lines: MemberLines | None = None
        """How members authenticate; until that is known, none is served."""
        self._notes: dict[str, bytes] = {}
        self._changed = threading.Condition()  # each connection has its own thread
        self._readers = threading.BoundedSemaphore(MAX_READERS)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self.dial = join_host_port(address, self._listener.getsockname()[1])
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        stop_listening(self._listener, self._closed)
        self._thread.join(1.0)

    def _accept(self) -> None:
        for line, _ in accepted(self._listener, self._closed):
            if not self._readers.acquire(blocking=False):
                line.close()
                continue
            serve_on_thread(line, self._serve, name="store-reader", refused=self._readers.release)

    def _serve(self, line: socket.socket) -> None:
        try:
            with line, suppress(OSError, WireError, AuthError, msgspec.MsgspecError):
                line.settimeout(IDLE_S)
                if self.lines is None:
                    return
                member = self.lines.listening(line)
                while True:
                    ask = _asks.decode(member.receive(most=2 * MAX_NOTE_BYTES))
                    member.send(msgspec.msgpack.encode(StoreAnswer(self._put_or_wait(ask))))
        finally:
            self._readers.release()

    def _put_or_wait(self, ask: StoreRequest) -> bytes | None:
        with self._changed:
            if ask.value is not None:
                self._notes[ask.key] = ask.value[:MAX_NOTE_BYTES]
                while len(self._notes) > MAX_NOTES:
                    del self._notes[next(iter(self._notes))]
                self._changed.notify_all()
            else:
                self._changed.wait_for(
                    lambda: ask.key in self._notes, min(IDLE_S, max(0.0, ask.wait_s))
                )
            return self._notes.get(ask.key)


class RendezvousStore(torch.distributed.Store):  # type: ignore[name-defined,misc]
    """One member's connection to a store, with the interface that Gloo expects."""

    def __init__(self, dial: str, prefix: str, *, lines: MemberLines, deadline: float) -> None:
        """Connect to a store at host:port `dial` of a member of the same job.

        All names get the prefix, which names the meeting; waits end at the monotonic `deadline`.

        Raises:
            PeerLost: no member answers there.
        """
        super().__init__()
        self._prefix, self._lines, self._deadline = prefix, lines, deadline
        self._server: Line | None = None
        try:
            self._line = socket.create_connection(split_host_port(dial), timeout=self._left_s())
        except (OSError, ConfigError) as error:
            raise PeerLost(
                "the first member's store does not answer", given=f"{dial} ({error})"
            ) from error

    def _left_s(self) -> float:
        return max(0.001, self._deadline - RealClock().monotonic())

    def close(self) -> None:
        """Close the connection; a wait on another thread raises PeerLost at once."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()

    # ----------------------------------------------------------- interface of Gloo

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        self._ask({key: value.encode() if isinstance(value, str) else bytes(value)})

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it."""
        return self.swap({}, [key])[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all values; only the store's own deadline applies."""
        for key in keys:
            self.get(key)

    # ----------------------------------------------------------- of our own

    def swap(self, own: Mapping[str, bytes], wanted: Sequence[str]) -> list[bytes]:
        """Store values and return others, waiting for them; one round trip if they are there."""
        found = dict.fromkeys(wanted, b"")
        missing = list(found)
        while own or missing:
            answers = self._ask({**own, **{key: None for key in missing if key not in own}})
            found |= {key: value for key, value in answers.items() if value is not None}
            own, missing = {}, [key for key in missing if answers[key] is None]
        return [found[key] for key in wanted]

    def _ask(self, asks: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
        """Send requests, values to store or None to wait for one; return all answers."""
        left_s = self._left_s()
        if RealClock().monotonic() >= self._deadline:
            raise DeadlineExceeded(
                "a member did not join the rendezvous", given=f"waited for {', '.join(asks)}"
            )
        try:
            self._line.settimeout(left_s + 0.1)
            if self._server is None:
                self._server = self._lines.dialling(self._line)
                self._line.settimeout(left_s + 0.1)
            for key, value in asks.items():
                ask = StoreRequest(f"{self._prefix}/{key}", value, left_s)
                self._server.send(msgspec.msgpack.encode(ask))
            return {
                key: _answers.decode(self._server.receive(most=2 * MAX_NOTE_BYTES)).value
                for key in asks
            }
        except TimeoutError as error:
            raise DeadlineExceeded("the first member's store takes too long") from error
        except (OSError, WireError, AuthError, msgspec.MsgspecError) as error:
            raise PeerLost("the first member's store is gone", given=str(error)) from error
