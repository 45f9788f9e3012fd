"""How a follower host finds the first host of its island, and reports when it cannot."""

from __future__ import annotations

import logging
import platform
import socket
import time
from collections.abc import Sequence

from atoll.config import WorkerEnvironment
from atoll.errors import AtollError, AuthError, JobError
from atoll.ids import member_of_follower
from atoll.net.http.client import HubClient
from atoll.net.member_tls import MemberTls
from atoll.net.proxies import hub_address
from atoll.node.islands.supervisor_link import Ready, SupervisorLink, greet
from atoll.node.machine.interfaces import address_towards
from atoll.wire.messages import RendezvousAddress

log = logging.getLogger(__name__)

SAY_S = 10.0
"""Interval of messages while waiting."""
REFUSED_S = 60.0
"""How long the hub may reject this process before the error is raised."""
DIAL_S = 3.0
"""Time limit per address of the first host."""
NO_WAY_S = 30.0
"""How long a renewed address may be unreachable before the error is raised."""


class RendezvousClient:
    """Finds the first host of an island."""

    def __init__(self, environment: WorkerEnvironment, client: HubClient) -> None:
        self._environment, self._client = environment, client
        self._member, _ = member_of_follower(environment.member)
        self._over = ""
        """Key of a server with a lost leader."""
        self.key = ""
        """Key of the server that `look` has connected to."""
        self._newest: RendezvousAddress | None = None
        self._failing_since: float | None = None
        """When connecting to the current server first failed."""
        self._renewals = 0
        """How often its address was renewed since, which shows that the first host is alive."""
        self._refused_since: float | None = None
        self._said = 0.0

    def pass_by(self, key: str) -> None:
        """Ignore that server from now on: its process has ended."""
        self._over = key

    def look(self) -> SupervisorLink | None:
        """Return a connection with the first host if there is one now.

        Raises:
            JobError: it is alive but unreachable.
            AuthError: the hub no longer knows this process.
        """
        address = self._ask()
        if address is None or _key(address) == self._over:
            self._say(f"waiting for the first machine of {self._member}")
            self._failing_since, self._newest = None, None
            return None
        if self._newest is None or _key(address) != _key(self._newest):
            self._failing_since, self._renewals = None, 0
        elif address.secret != self._newest.secret:
            self._renewals += 1
        self._newest = address
        tried: list[str] = []
        for dial in address.dial.split():
            try:
                link = self._dial(dial, key=_key(address))
            except (OSError, ValueError, AtollError) as error:
                tried.append(f"{dial} ({_words(error)})")
                continue
            log.info("%s is connected to %s at %s", self._environment.member,
                     self._member, dial)  # fmt: skip
            self.key, self._failing_since = _key(address), None
            return link
        self._failed(tried)
        return None

    def _ask(self) -> RendezvousAddress | None:
        now = time.monotonic()
        try:
            address = self._client.find_rendezvous(self._environment.job, self._member)
        except AuthError:
            self._refused_since = self._refused_since or now
            if now >= self._refused_since + REFUSED_S:
                raise
            return None
        except AtollError as error:
            self._say(f"the hub does not return the address of {self._member}: {error}")
            return None
        self._refused_since = None
        return address

    def _dial(self, dial: str, *, key: str) -> SupervisorLink:
        target = hub_address(f"http://{dial}")
        sock = socket.create_connection((target.host, target.port), timeout=DIAL_S)
        tls = MemberTls(key.encode(), name=self._environment.member)
        try:
            link = greet(sock, tls=tls, leader=self._member)
            link.send(Ready(platform.node()))
            return link
        except BaseException:
            sock.close()
            raise

    def _failed(self, tried: Sequence[str]) -> None:
        """Note a failure; raises JobError if it lasts while the address is being renewed."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self._say(f"the first machine of {self._member} is not reached: {'; '.join(tried)}")
        if self._renewals < 2 or now < self._failing_since + NO_WAY_S:
            return
        target = hub_address(f"http://{self._newest.dial.split()[0]}") if self._newest else None
        own = address_towards(target.host, target.port) if target else ""
        raise JobError(
            "the first machine of this island is unreachable",
            given=f"{self._environment.member} on {platform.node()} "
            f"({own or 'no address of its own'}) dialled {'; '.join(tried)}",
            expected="machines of one island reach each other at any port of one network",
            remedy="allow this in the firewalls of both, choose machines of one network by "
            "labels in [needs], or set machines = 1: one island per machine",
        )

    def _say(self, text: str) -> None:
        """Log a message, at most once per `SAY_S`."""
        now = time.monotonic()
        if now >= self._said + SAY_S:
            self._said = now
            log.info("%s", text)


def _key(address: RendezvousAddress) -> str:
    """Return the part of a secret that stays when the address is published again."""
    return address.secret.partition(".")[0]


def _words(error: BaseException) -> str:
    return error.what if isinstance(error, AtollError) else str(error) or type(error).__name__
