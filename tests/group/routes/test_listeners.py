"""What accepts the connections of members goes on when one of them gets no thread."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from atoll.group.peers import direct
from atoll.group.peers.channel import MailQueue
from atoll.group.peers.direct import DirectListener
from atoll.group.routes import line_listener, rendezvous_store
from atoll.group.routes.line_listener import GroupListener
from atoll.group.routes.member_lines import MemberLines
from atoll.group.routes.rendezvous_store import StoreServer, split_host_port
from tests.patience import PROMPT_S
from tests.thread_limit import no_more_threads

KEY = b"key of this job"
HOST = "127.0.0.1"

Listening = StoreServer | GroupListener | DirectListener


def members(name: str) -> MemberLines:
    return MemberLines(KEY, me=name)


def store() -> StoreServer:
    server = StoreServer(HOST)
    server.lines = members("w0")
    return server


def group_listener() -> GroupListener:
    listener = GroupListener(HOST)
    tls = members("w0").tls
    assert tls is not None
    listener.trust(tls)
    return listener


def direct_listener() -> DirectListener:
    return DirectListener(MailQueue(), address=HOST, lines=members("w0"), job="job", me="w0")


@pytest.mark.parametrize(
    ("listen", "name"),
    [(store, "store-reader"), (group_listener, "lines-greet"), (direct_listener, "peers-line")],
)
def test_one_without_a_thread_takes_no_place(
    listen: Callable[[], Listening], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_store, "MAX_READERS", 1)
    monkeypatch.setattr(line_listener, "MOST_STRANGERS", 1)
    monkeypatch.setattr(direct, "MOST_LINES", 1)
    listener = listen()
    place = split_host_port(listener.dial)
    with no_more_threads(name), socket.create_connection(place, PROMPT_S) as first:
        assert first.recv(1) == b""
    with socket.create_connection(place, PROMPT_S) as second:
        members("w1").dialling(second)
    listener.close()
