from __future__ import annotations

import socket
import threading

import pytest

from atoll.errors import ConfigError, HubUnreachable
from atoll.group.routes import rendezvous_store
from atoll.group.routes.rendezvous_store import (
    join_host_port,
    own_address,
    probe_peers,
    split_host_port,
)
from tests.patience import PROMPT_S


def test_own_address_towards_this_machine_is_loopback() -> None:
    assert own_address("http://127.0.0.1:9999") == "127.0.0.1"


def test_url_without_a_host_and_unknown_hosts_are_errors() -> None:
    with pytest.raises(ConfigError):
        own_address("nonsense")
    with pytest.raises(HubUnreachable):
        own_address("http://no-such-host.invalid:1")


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7", "kitchen.local"])
def test_addresses_survive_the_way_there_and_back(host: str) -> None:
    assert split_host_port(join_host_port(host, 4321)) == (host, 4321)


def test_probe_finds_those_who_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        open_dial = f"127.0.0.1:{server.getsockname()[1]}"
        dead_dial = f"127.0.0.1:{closed.getsockname()[1]}"
        found = probe_peers(
            {
                "w0": [dead_dial, open_dial],
                "w1": [dead_dial],
                "w2": [],
                "w3": ["not an address"],
                "w9": ["two..dots:80", f"{'a' * 64}:80", "10.0.0.7:²", "10.0.0.7:0"],
                "w4": [open_dial],
                **{f"w{slot}": ["192.0.2.1:9"] for slot in range(5, 9)},
            },
            timeout_s=0.5,
        )
        assert found == ["w0", "w4"]


def test_probe_asks_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dials = {f"w{slot}": [f"192.0.2.{slot}:9", f"192.0.2.{slot}:10"] for slot in range(5)}
    asked = threading.Barrier(10)

    def answer(dial: str, *, timeout_s: float) -> bool:
        asked.wait(PROMPT_S)  # only once all are asked
        return dial.endswith("3:10")

    monkeypatch.setattr(rendezvous_store, "answers", answer)
    assert probe_peers(dials) == ["w3"]


@pytest.mark.parametrize(
    "dial", ["nonsense", ":80", "host:", "host:²", "host:0", "host:65536", "two..dots:80"]
)
def test_what_another_member_names_may_be_no_address(dial: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        split_host_port(dial)
