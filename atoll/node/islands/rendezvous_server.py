"""Where the first machine of an island awaits its others, the hands.

The gate is a listening socket, and a note of it at the hub, from whom only the hands of this member
can have it. Whoever dials and cannot prove that it knows the secret is turned away; each of them is
heard in a thread of its own, so that one that says nothing holds nobody up.
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
from atoll.net.endpoint import endpoint_of
from atoll.net.proxies import at_address
from atoll.node.islands.supervisor_link import SupervisorLink, Word, receive
from atoll.node.machine.interfaces import is_loopback, meeting_addresses
from atoll.wire.messages import RendezvousAddress

log = logging.getLogger(__name__)

RENEW_S = 3.0
"""Pause between two notes to the hub while hands are missing: it may have restarted, and hands see
by a new note that this machine lives."""
HUB_TIMEOUT_S = 5.0
MOST_STRANGERS = 32
"""Connections that may be at their first words at once; more are turned away."""


@dataclass(frozen=True, eq=False)
class Follower:
    """A further machine that is here now."""

    part: int
    """Its number among the machines of the island: 1, 2, ..."""
    name: str
    """Of its process and its machine, for people: `w0.1 on far`."""
    link: SupervisorLink


@dataclass(frozen=True, slots=True)
class Joined:
    """A hand is here."""

    hand: Follower


@dataclass(frozen=True, slots=True)
class Left:
    """A hand is here no more."""

    hand: Follower
    why: str


@dataclass(frozen=True, slots=True)
class Received:
    """A hand has said something."""

    hand: Follower
    word: Word


HandNews: TypeAlias = Joined | Left | Received


class RendezvousServer:
    """The gate of one process of a member; use it with `with`."""

    def __init__(
        self, environment: WorkerEnvironment, *, machines: int, tell: Callable[[HandNews], None]
    ) -> None:
        """Open nothing yet.

        Args:
            environment: What the node agent told the member.
            machines: How many the island has, this one included.
            tell: Called with everything that happens, in threads of the gate.
        """
        self._environment = environment
        self._member = environment.member
        self._parts = range(1, machines)
        self._tell = tell
        self._secret = new_token()
        self._addresses: Sequence[str] = ()
        self._listener: socket.socket | None = None
        self._hands: dict[int, Follower] = {}
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._closed = threading.Event()

    def __enter__(self) -> RendezvousServer:
        """Listen, and tell the hub from now on.

        Raises:
            JobError: no other machine can reach this one.
        """
        self._addresses = meeting_addresses(self._environment.hub)
        try:
            if not self._addresses:
                raise OSError("it has none")
            self._listener = _listen(self._addresses)
        except OSError as error:
            raise JobError(
                "the first machine of an island cannot be dialled by the others",
                given=f"hub {self._environment.hub}, own addresses {self._addresses} ({error})",
                remedy="look at the network of this machine, or set machines = 1 in [island]",
            ) from error
        for work in (self._accept, self._renew):
            threading.Thread(target=work, args=(self._listener,), name="gate", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it, and every connection."""
        self._closed.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for hand in self.hands().values():
            hand.link.close()

    def hands(self) -> dict[int, Follower]:
        """Return the hands that are here, by number."""
        with self._lock:
            return dict(sorted(self._hands.items()))

    def missing(self) -> list[str]:
        """Return the names of the hands that are not here."""
        here, slot = self.hands(), slot_of(self._member)
        return [follower_id(slot, part) for part in self._parts if part not in here]

    def meeting_address(self) -> str:
        """Return the address of this machine at which the ranks are to meet.

        It is one by which a hand came; a hand on this very machine can use any of them.
        """
        found = [hand.link.own_address for hand in self.hands().values()]
        found += self._addresses[:1]
        return next((one for one in found if not is_loopback(one)), found[0])

    # ------------------------------------------------------------------------- at the hub

    def _renew(self, listener: socket.socket) -> None:
        """Tell the hub where the gate is, as long as hands are missing."""
        from atoll.net.http.client import HubClient  # keepers on one machine ask no hub

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
                    gate = RendezvousAddress(dial, f"{self._secret}.{number}")
                    try:
                        client.open_gate(self._environment.job, self._member, gate)
                    except AtollError as error:
                        log.info("the hub does not take the gate at %s: %s", dial, error)
                if self._closed.wait(RENEW_S):
                    return

    # -------------------------------------------------------------------------- at the gate

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                self._closed.wait(0.1)  # e.g. no more files: do not spin
                continue
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._receive, args=(sock, address), daemon=True).start()

    def _receive(self, sock: socket.socket, address: tuple[str, int]) -> None:
        """Hear who has dialled."""
        try:
            name, machine, link = receive(sock, secret=self._secret)
            part = self._part_of(name)
        except (OSError, AtollError) as error:
            log.warning("%s was turned away at the gate: %s", address[0], error)
            sock.close()
            return
        finally:
            self._strangers.release()
        self._welcome(Follower(part, f"{name} on {machine}", link))

    def _part_of(self, name: str) -> int:
        """Return the number of a hand.

        Raises:
            WireError: it is no hand of this island.
        """
        with suppress(ValueError):
            if is_follower(name):
                member, part = member_of_follower(name)
                if member == self._member and part in self._parts:
                    return part
        raise WireError(
            "no hand of this island has this name", given=name[:80],
            expected=", ".join(follower_id(slot_of(self._member), part) for part in self._parts),
        )  # fmt: skip

    def _welcome(self, hand: Follower) -> None:
        with self._lock:
            former = self._hands.get(hand.part)
            self._hands[hand.part] = hand
        if former is not None:  # launched again before the end of the other was noticed
            former.link.close()
            self._tell(Left(former, "a newer process has taken its place"))
        log.info("%s is here", hand.name)
        self._tell(Joined(hand))
        hand.link.run(
            lambda word: self._tell(Received(hand, word)), lambda why: self._lost(hand, why)
        )
        if self._closed.is_set():
            hand.link.close()

    def _lost(self, hand: Follower, why: str) -> None:
        with self._lock:
            if self._hands.get(hand.part) is hand:
                del self._hands[hand.part]
        log.info("%s is gone: %s", hand.name, why)
        self._tell(Left(hand, why))


def _listen(addresses: Sequence[str]) -> socket.socket:
    """Listen on a free port, at one address or on all of this machine."""
    six = any(":" in address for address in addresses)
    family = socket.AF_INET6 if six else socket.AF_INET
    if len(addresses) == 1:
        return socket.create_server((addresses[0], 0), family=family, backlog=MOST_STRANGERS)
    return socket.create_server(("", 0), family=family, dualstack_ipv6=six, backlog=MOST_STRANGERS)
