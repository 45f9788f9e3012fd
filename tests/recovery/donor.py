"""A donor as a process of its own, so that it can be killed and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from atoll.ids import session_id
from atoll.net.handshake import make_hello
from atoll.net.sync_link import connect
from atoll.recovery import StateServer
from atoll.state_lock import StateLock
from tests.recovery.model import LOCAL, Model


@dataclass(frozen=True)
class Given:
    """What such a donor needs to know."""

    hub: str
    job: str
    member: str
    token: str
    direct: bool
    model: Mapping[str, int]


def be_a_donor(given: Given, pipe: Connection) -> None:
    """Serve a state, telling where, until the other side hangs up."""
    session = session_id(given.job, given.member)
    address = LOCAL if given.direct else ""
    with (
        connect(given.hub, make_hello(session, given.token)) as link,
        StateServer(job=given.job, token=given.token, address=address, link=link) as server,
    ):
        server.offer(Model(given.member, **given.model), still=StateLock().still)
        pipe.send(server.dial)
        pipe.poll(None)
