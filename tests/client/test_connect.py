"""`atoll.connect`: a program has the promises of a job's queues, and no other right."""

from __future__ import annotations

import concurrent.futures
import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import atoll
from atoll.client import program
from atoll.errors import AtollError, AuthError, ConfigError, HubUnreachable
from atoll.hub.server import HubServer
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.sync_link import connect as open_session
from atoll.wire.messages import Drain
from tests.patience import PATIENCE_S


def test_two_programs_share_a_queue_and_a_topic(hub: HubServer, home: Path, ticket: str) -> None:
    with (
        atoll.connect(ticket, home=home, name="maker") as one,
        atoll.connect(ticket, home=home) as other,
    ):
        assert one.name == other.name == "maker"  # the login that the ticket was exchanged for
        assert one.hub == hub.url
        news = other.topic("pool/news").subscribe("reader")
        queue = one.queue("pool/work", max_items=10)
        queue.put({"seed": 7}, key="k")
        queue.put({"seed": 7}, key="k")  # stored once
        (item,) = other.queue("pool/work").claim(limit=5)
        assert item.value == {"seed": 7}
        item.release("not now")
        (again,) = one.queue("pool/work").claim()
        assert again.attempt == 2
        again.ack()
        assert other.queue("pool/work").claim() == []
        one.topic("pool/news").publish({"round": 1})
        entry = news.newest(wait_s=PATIENCE_S)
        assert entry is not None
        assert entry.value == {"round": 1}


def test_what_is_put_later_is_stored_when_the_block_ends(
    hub: HubServer, home: Path, ticket: str
) -> None:
    with atoll.connect(ticket, home=home) as client:
        for number in range(50):
            client.queue("pool/later").put_later(number)
    with atoll.connect(ticket, home=home) as client:
        found = client.queue("pool/later").claim(limit=100)
        assert [item.value for item in found] == list(range(50))


def test_what_was_not_stored_in_time_is_logged(
    hub: HubServer, home: Path, ticket: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = atoll.connect(ticket, home=home)
    queue = client.queue("pool/narrow", max_items=1, overflow="wait")
    queue.put(1)
    queue.put_later(2)
    assert not client.close(timeout_s=0.0)
    assert "not stored" in caplog.text


def test_large_values_travel_as_blobs(hub: HubServer, home: Path, ticket: str) -> None:
    import numpy as np

    array = np.arange(100_000, dtype=np.float32)
    with atoll.connect(ticket, home=home) as client:
        client.queue("pool/large").put({"x": array})
        (item,) = client.queue("pool/large").claim()
        assert np.array_equal(item.value["x"], array)
        item.ack()


def test_the_variable_names_the_ticket(
    hub: HubServer, home: Path, ticket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_TICKET", ticket)
    with atoll.connect(home=home) as client:
        assert client.token


def test_a_used_ticket_is_good_on_the_machine_that_used_it_only(
    hub: HubServer, home: Path, ticket: str, tmp_path: Path
) -> None:
    atoll.connect(ticket, home=home).close()
    atoll.connect(ticket, home=home).close()
    with pytest.raises(AuthError, match="used"):
        atoll.connect(ticket, home=tmp_path / "other")


def test_a_named_proxy_is_used_by_a_remembered_login(
    hub: HubServer, home: Path, ticket: str
) -> None:
    atoll.connect(ticket, home=home).close()
    with pytest.raises(HubUnreachable):
        atoll.connect(ticket, home=home, proxy="http://127.0.0.1:1", timeout_s=0.5)
    atoll.connect(ticket, home=home).close()


def test_names_are_whole_and_no_jobs_nor_the_hubs(hub: HubServer, home: Path, ticket: str) -> None:
    with atoll.connect(ticket, home=home) as client:
        with pytest.raises(ConfigError, match="names queues in full"):
            client.queue("work")
        with pytest.raises(AtollError, match="may not use this queue"):
            client.queue("node/box").put(1)
        with HubClient(hub.url, hub.operator_token) as operator:
            job = operator.submit('[job]\nname = "tiny"\nnodes = 1\n')
        with pytest.raises(AtollError, match="queues of a job"):
            client.queue(f"{job}/experience").put(1)


def test_a_program_may_use_queues_and_nothing_else(hub: HubServer, home: Path, ticket: str) -> None:
    with atoll.connect(ticket, home=home) as client:
        with HubClient(hub.url, client.token) as rest, pytest.raises(AuthError, match="permit"):
            rest.jobs()
        with pytest.raises(AuthError, match="may not open this session"):
            open_session(hub.url, make_hello("job/w0", client.token))
        link = open_session(hub.url, make_hello(f"program/{client.name}.x", client.token))
        with link, pytest.raises(AtollError):
            link.request(Drain(draining=True, leaving=False, reason=""), timeout_s=5.0)


@pytest.mark.parametrize("role", ["node", "viewer"])
def test_tickets_of_others_are_refused(hub: HubServer, home: Path, role: str) -> None:
    with HubClient(hub.url, hub.operator_token) as client:
        other = client.create_ticket(role=role, uses=1, valid_s=60.0, name="", quotas={})
    with pytest.raises(AuthError, match=role):
        atoll.connect(other, home=home)


def test_a_revoked_ticket_ends_its_logins(hub: HubServer, home: Path, ticket: str) -> None:
    atoll.connect(ticket, home=home, name="gone").close()
    with HubClient(hub.url, hub.operator_token) as client:
        (row,) = [one for one in client.tickets() if "gone" in one["used_by"]]
        assert client.revoke_ticket(row["id"]) == ["gone"]
    with pytest.raises(AuthError, match="revoked"):
        atoll.connect(ticket, home=home)


def test_it_needs_no_torch() -> None:
    code = "import atoll, sys; atoll.connect; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_programs_that_log_in_together_keep_both_logins(
    hub: HubServer, home: Path, ticket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubClient(hub.url, hub.operator_token) as client:
        second = client.create_ticket(role="program", uses=1, valid_s=60.0, name="", quotas={})
    both, load = threading.Barrier(2, timeout=0.5), program._load

    def load_together(path: Path) -> dict[str, program.Login]:
        """Let both programs read before one writes, unless a lock forbids it."""
        found = load(path)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()
        return found

    monkeypatch.setattr(program, "_load", load_together)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for one in pool.map(lambda text: atoll.connect(text, home=home), (ticket, second)):
            one.close()
    monkeypatch.undo()
    assert len(load(home / "programs.json")) == 2


def test_a_refused_login_is_made_again_by_its_ticket(hub: HubServer, home: Path) -> None:
    with HubClient(hub.url, hub.operator_token) as client:
        ticket = client.create_ticket(role="program", uses=2, valid_s=60.0, name="", quotas={})
    with atoll.connect(ticket, home=home) as made:
        token = made.token
    path = home / "programs.json"
    path.write_text(path.read_text().replace(token, token[::-1]))  # as if the hub was reset
    for _ in range(2):
        with atoll.connect(ticket, home=home) as made:
            assert made.queue("pool/again").claim() == []
