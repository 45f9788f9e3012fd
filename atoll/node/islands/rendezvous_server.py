"""The rendezvous of an island: its follower hosts connect to the first host.

The server listens on a free port and publishes address and secret at the hub, which sends them only
to the follower hosts of this member. A connection that cannot prove the secret is closed; each
handshake has its own thread, so that a silent one does not delay others.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from atoll.config import WorkerEnvironment
from atoll.errors import AtollError, JobError, WireError
from atoll.ids import follower_id, is_follower, member_of_follower, new_token, slot_of
from atoll.net.accepting import accepted, serve_on_thread, stop_listening
from atoll.net.endpoint import endpoint_of
from atoll.net.member_tls import MemberTls
from atoll.net.proxies import at_address
from atoll.node.islands.supervisor_link import SupervisorLink, Word, receive
from atoll.node.machine.interfaces import is_loopback, meeting_addresses
from atoll.wire.messages import RendezvousAddress

log = logging.getLogger(__name__)

RENEW_S = 3.0
"""Interval of publications while follower hosts are missing: the hub may have restarted, and a new
secret shows follower hosts that this host is alive."""
HUB_TIMEOUT_S = 5.0
MOST_HANDSHAKES = 32
"""Concurrent handshakes; further connections are closed."""


@dataclass(frozen=True, eq=False)
class Follower:
    """A connected follower host."""

    part: int
    """Its number among the hosts of the island: 1, 2, ..."""
    name: str
    """Its process and host, for people: `w0.1 on far`."""
    link: SupervisorLink


@dataclass(frozen=True, slots=True)
class Joined:
    """A follower host has connected."""

    follower: Follower


@dataclass(frozen=True, slots=True)
class Left:
    """A follower host was lost."""

    follower: Follower
    why: str


@dataclass(frozen=True, slots=True)
class Received:
    """A follower host has sent a message."""

    follower: Follower
    word: Word


FollowerNews: TypeAlias = Joined | Left | Received


class RendezvousServer:
    """Accepts the follower hosts of one member; a context manager."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        machines: int,
        on_news: Callable[[FollowerNews], None],
    ) -> None:
        """Prepare to serve an island of `machines` hosts, this one included.

        `on_news` is called with every event, on threads of the server.
        """
        self._environment = environment
        self._member = environment.member
        self._parts = range(1, machines)
        self._on_news = on_news
        self._secret = new_token()
        self._tls = MemberTls(self._secret.encode(), name=self._member)
        self._addresses: Sequence[str] = ()
        self._listener: socket.socket | None = None
        self._followers: dict[int, Follower] = {}
        # Handshakes and lost connections change `_followers` on their own threads.
        self._lock = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(MOST_HANDSHAKES)
        self._closed = threading.Event()

    def __enter__(self) -> RendezvousServer:
        """Listen and publish the address; raises JobError if this host is unreachable."""
        self._addresses = meeting_addresses(self._environment.hub)
        try:
            if not self._addresses:
                raise OSError("it has none")
            self._listener = _listen(self._addresses)
        except OSError as error:
            raise JobError(
                "the first machine of an island is unreachable for the others",
                given=f"hub {self._environment.hub}, own addresses {self._addresses} ({error})",
                remedy="look at the network of this machine, or set machines = 1 in [island]",
            ) from error
        for work in (self._accept, self._renew):
            threading.Thread(
                target=work, args=(self._listener,), name="rendezvous", daemon=True
            ).start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._listener is not None:
            stop_listening(self._listener, self._closed)
        for follower in self.followers().values():
            follower.link.close()

    def followers(self) -> dict[int, Follower]:
        """Return the connected follower hosts, by number."""
        with self._lock:
            return dict(sorted(self._followers.items()))

    def dismiss(self, follower: Follower) -> None:
        """Count a follower host as missing from now on; its connection stays until it leaves."""
        with self._lock:
            if self._followers.get(follower.part) is follower:
                del self._followers[follower.part]

    def missing(self) -> list[str]:
        """Return the names of missing follower hosts."""
        here, slot = self.followers(), slot_of(self._member)
        return [follower_id(slot, part) for part in self._parts if part not in here]

    def meeting_address(self) -> str:
        """Return the address of this host at which the ranks meet.

        It is one that a follower host has reached; followers on this host can use any of them.
        """
        found = [follower.link.own_address for follower in self.followers().values()]
        found += self._addresses[:1]
        return next((one for one in found if not is_loopback(one)), found[0])

    # ------------------------------------------------------------------------ publication

    def _renew(self, listener: socket.socket) -> None:
        """Publish the address at the hub repeatedly while follower hosts are missing."""
        from atoll.net.http.client import HubClient  # an island on one machine asks no hub

        port = int(listener.getsockname()[1])
        dial = " ".join(at_address(address, port) for address in self._addresses)
        number = 0
        with HubClient(
            self._environment.hub, self._environment.token, endpoint=endpoint_of(self._environment),
            timeout_s=HUB_TIMEOUT_S,
        ) as client:  # fmt: skip
            while True:
                if self.missing():
                    number += 1
                    address = RendezvousAddress(dial, f"{self._secret}.{number}")
                    try:
                        client.publish_rendezvous(self._environment.job, self._member, address)
                    except AtollError as error:
                        log.info("the hub does not publish the rendezvous at %s: %s", dial, error)
                if self._closed.wait(RENEW_S):
                    return

    # -------------------------------------------------------------------------- connections

    def _accept(self, listener: socket.socket) -> None:
        for sock, address in accepted(listener, self._closed):
            if not self._handshakes.acquire(blocking=False):
                sock.close()
                continue
            serve_on_thread(
                sock, self._receive, address, name="rendezvous-greet",
                refused=self._handshakes.release,
            )  # fmt: skip

    def _receive(self, sock: socket.socket, address: tuple[str, int]) -> None:
        try:
            name, machine, link = receive(sock, tls=self._tls)
            part = self._part_of(name)
        except (OSError, AtollError) as error:
            log.warning("a connection from %s was refused: %s", address[0], error)
            sock.close()
            return
        finally:
            self._handshakes.release()
        self._add(Follower(part, f"{name} on {machine}", link))

    def _part_of(self, name: str) -> int:
        """Return the number of a follower host; raises WireError if the name is invalid."""
        with suppress(ValueError):
            if is_follower(name):
                member, part = member_of_follower(name)
                if member == self._member and part in self._parts:
                    return part
        raise WireError(
            "no follower host of this island has this name", given=name[:80],
            expected=", ".join(follower_id(slot_of(self._member), part) for part in self._parts),
        )  # fmt: skip

    def _add(self, follower: Follower) -> None:
        with self._lock:
            former = self._followers.get(follower.part)
            self._followers[follower.part] = follower
        if former is not None:  # launched again before the loss of the other was noticed
            former.link.close()
            self._on_news(Left(former, "a newer process has taken its place"))
        log.info("%s has connected", follower.name)
        self._on_news(Joined(follower))
        follower.link.run(
            lambda word: self._on_news(Received(follower, word)),
            lambda why: self._lost(follower, why),
        )
        if self._closed.is_set():
            follower.link.close()

    def _lost(self, follower: Follower, why: str) -> None:
        with self._lock:
            if self._followers.get(follower.part) is follower:
                del self._followers[follower.part]
        log.info("%s is gone: %s", follower.name, why)
        self._on_news(Left(follower, why))


def _listen(addresses: Sequence[str]) -> socket.socket:
    """Listen on a free port, at one address or on all of this host."""
    six = any(":" in address for address in addresses)
    family = socket.AF_INET6 if six else socket.AF_INET
    if len(addresses) == 1:
        return socket.create_server((addresses[0], 0), family=family, backlog=MOST_HANDSHAKES)
    return socket.create_server(("", 0), family=family, dualstack_ipv6=six, backlog=MOST_HANDSHAKES)
