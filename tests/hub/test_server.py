from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll.errors import ConfigError, PortTaken
from atoll.hub.app import HubOptions
from atoll.hub.server import ACCEPTED_AT_ONCE, HubServer, bind, reachable_url
from atoll.wire.messages import Beat, Done, RoundJoin, RoundPlan, RoundVote, Verdict, Welcome
from tests.hub.membership import launches, registered, until
from tests.hub.peer import NODE, Peer, member, node, submit
from tests.patience import PATIENCE_S, PROMPT_S


class Process:
    """A hub as a program."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "atoll.hub", "--data", str(folder / "data")),
                *("--jobs", str(folder / "runs"), *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.ready_s = time.monotonic() - self.began
        self.info: dict[str, Any] = json.loads(self.line) if self.line else {}

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float, str]:
        """Send a signal; return exit status, seconds until the end, standard error."""
        began = time.monotonic()
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, time.monotonic() - began, errors


@contextmanager
def program(folder: Path, *arguments: str) -> Iterator[Process]:
    process = Process(folder, *arguments)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
        process.process.communicate(timeout=PATIENCE_S)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.every(2)
def test_one_line_says_ready_and_a_signal_ends_it_cleanly(tmp_path: Path, number: int) -> None:
    with program(tmp_path) as hub:
        assert set(hub.info) == {"url", "port", "ticket", "operator_token", "ca"}
        assert httpx.get(hub.info["url"] + "/healthz", timeout=PATIENCE_S).status_code == 200
        code, seconds, errors = hub.end(number)
        assert (code, errors) == (0, "")
        assert seconds < PROMPT_S


def test_open_streams_and_sessions_do_not_delay_the_end(tmp_path: Path) -> None:
    with program(tmp_path) as hub:
        headers = {"Authorization": "Bearer " + hub.info["operator_token"]}
        url = hub.info["url"] + "/api/stream"
        streaming = threading.Event()

        def listen() -> None:
            with httpx.stream("GET", url, headers=headers, timeout=PATIENCE_S) as response:
                assert response.status_code == 200
                streaming.set()
                for _ in response.iter_raw():
                    pass

        reader = threading.Thread(target=lambda: suppress(listen), daemon=True)
        reader.start()
        assert streaming.wait(PATIENCE_S)
        code, seconds, _ = hub.end()
        assert code == 0
        assert seconds < PROMPT_S
        reader.join(PATIENCE_S)


def suppress(function: Any) -> None:
    """Run a function that the end of the hub cuts off."""
    try:
        function()
    except httpx.HTTPError:
        return


def test_ticket_and_operator_token_survive_a_restart(tmp_path: Path) -> None:
    for uses in ((), ("--ticket-uses", "3")):
        with program(tmp_path, *uses) as hub:
            first = hub.info
            hub.end()
        with program(tmp_path, "--port", str(first["port"]), *uses) as hub:
            assert hub.info == first


def test_limited_ticket_is_another_one_and_runs_out(tmp_path: Path) -> None:
    with HubServer(HubOptions(data=tmp_path / "d", jobs=tmp_path / "j", ticket_uses=1)) as hub:
        secret = hub.ticket.rpartition("/")[2]
        for status in (201, 401):
            answer = httpx.post(
                hub.url + "/api/join", json={"secret": secret, "name": "n"}, timeout=PATIENCE_S
            )
            assert answer.status_code == status


def test_wrong_option_leaves_the_data_folder_free(tmp_path: Path) -> None:
    options = HubOptions(data=tmp_path / "d", jobs=tmp_path / "j", reducers=False)
    wrong = dataclasses.replace(options, trust_proxy=("nonsense",))
    with pytest.raises(ConfigError), contextlib.ExitStack() as stack:
        stack.enter_context(HubServer(wrong))
    with HubServer(options) as hub:
        assert hub.url


def test_advertised_host_is_in_the_ticket(tmp_path: Path) -> None:
    options = HubOptions(data=tmp_path / "d", jobs=tmp_path / "j", advertise="hub.example")
    with HubServer(options) as hub:
        assert hub.ticket.startswith(f"atoll://hub.example:{hub.port}/")


def test_port_taken_is_said_with_a_remedy(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match="--port"):
            bind("127.0.0.1", port)
        with program(tmp_path, "--port", str(port)) as hub:
            _, errors = hub.process.communicate(timeout=PATIENCE_S)
            assert hub.process.returncode == 1
            assert "what to do" in errors
            assert "Traceback" not in errors


def test_port_taken_is_raised_in_process(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as listener:
        options = HubOptions(
            data=tmp_path / "d", jobs=tmp_path / "j", port=listener.getsockname()[1]
        )
        with pytest.raises(PortTaken), HubServer(options):
            pass


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen on this address"):
        bind("192.0.2.1", 0)


def test_url_of_a_hub_that_listens_everywhere_names_one_address() -> None:
    assert reachable_url("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert "0.0.0.0" not in reachable_url("0.0.0.0", 80)
    assert reachable_url("::1", 80) == "http://[::1]:80"


def test_second_hub_on_the_same_data_is_refused(tmp_path: Path) -> None:
    with program(tmp_path), program(tmp_path) as second:
        _, errors = second.process.communicate(timeout=PATIENCE_S)
        assert second.process.returncode == 1
        assert "Traceback" not in errors


def test_hub_is_small_and_ready_soon(tmp_path: Path) -> None:
    with program(tmp_path) as hub:
        peers = [Peer(shell(hub), f"j/w{slot}") for slot in range(4)]
        for peer in peers:
            assert isinstance(peer.welcome, Welcome)
            assert isinstance(peer.request(Beat()), Done)
        used = resident_bytes(hub.process.pid)
        for peer in peers:
            peer.close()
        assert used < 90e6
        assert hub.ready_s < PROMPT_S  # 1.5 s on a machine that does nothing else


def shell(hub: Process) -> HubServer:
    """Return what peers need to dial a hub that runs as a program."""
    server = HubServer(HubOptions(data=Path(), jobs=Path()))
    server.port, server.operator_token = hub.info["port"], hub.info["operator_token"]
    return server


def test_plan_and_verdict_survive_a_hub_that_is_killed(tmp_path: Path) -> None:
    spec = '[job]\nname = "j"\nnodes = 2\nroute = "relay"\n'
    with program(tmp_path, "--no-reducers") as hub:
        port = str(hub.info["port"])
        headers = {"Authorization": "Bearer " + hub.info["operator_token"]}
        jobs_url = hub.info["url"] + "/api/jobs"
        agent = Peer(shell(hub), "box", info=NODE)
        body = {"spec": spec, "files": {}}
        job = httpx.post(jobs_url, json=body, headers=headers, timeout=PATIENCE_S).json()["job"]
        launched = launches(agent, 3)
        peers = [member(shell(hub), launched[m]) for m in ("reducer", "w0", "w1")]
        for peer in peers[1:]:
            registered(peer)
        ids = [peer.ask(RoundJoin(0, "base")) for peer in peers[1:]]
        plans = [peer.answer(id) for peer, id in zip(peers[1:], ids, strict=True)]
        plan = plans[0]
        assert isinstance(plan, RoundPlan)
        peers[1].ask(RoundVote(0, plan.epoch, True, "d", ["w0", "w1"]))
        hub.end(signal.SIGKILL)
        for peer in (agent, *peers):
            peer.close()
    vote = RoundVote(0, plan.epoch, True, "d", ["w0", "w1"])
    verdicts = []
    for _ in range(2):
        with program(tmp_path, "--no-reducers", "--port", port) as hub:
            peers = [member(shell(hub), launched[m]) for m in ("w0", "w1")]
            ids = [peer.ask(vote) for peer in peers]
            verdicts += [peer.answer(id) for peer, id in zip(peers, ids, strict=True)]
            view = httpx.get(f"{jobs_url}/{job}", headers=headers, timeout=PATIENCE_S).json()
            assert view["committed_round"] == 1
            hub.end(signal.SIGKILL)
            for peer in peers:
                peer.close()
    assert verdicts == [Verdict(0, plan.epoch, True, "d", ["w0", "w1"])] * 4


def test_hub_never_loads_torch(tmp_path: Path) -> None:
    code = (
        "import sys, atoll.hub.__main__\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')"
        " or m.startswith('atoll.net')]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_other_websocket_paths_are_refused(tmp_path: Path) -> None:
    with HubServer(HubOptions(data=tmp_path / "d", jobs=tmp_path / "j")) as hub:
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        assert (
            httpx.get(hub.url + "/elsewhere", headers=headers, timeout=PATIENCE_S).status_code
            == 403
        )


def test_a_stopped_hub_drops_peers_that_do_not_read(tmp_path: Path) -> None:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "runs", reducers=False)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with HubServer(options) as hub:
            deaf.connect(("127.0.0.1", hub.port))
            deaf.sendall(b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n" * 2_000)
            server = hub._server
            assert server is not None
            until(lambda: bool(server.server_state.connections))
            (connection,) = server.server_state.connections
            until(lambda: connection.transport.get_write_buffer_size() > 0)
        assert connection not in server.server_state.connections
        assert connection.transport.is_closing()


def test_a_stopped_hub_leaves_uvicorns_log_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "runs", reducers=False)
    with HubServer(options):
        pass
    logging.getLogger("uvicorn.error").error("of another server")
    assert "of another server" in caplog.text


def test_job_and_node_are_seen_over_rest(tmp_path: Path) -> None:
    options = HubOptions(data=tmp_path / "d", jobs=tmp_path / "j", reducers=False)
    with HubServer(options) as hub, node(hub, "box"):
        job = submit(hub, nodes=3)
        headers = {"Authorization": f"Bearer {hub.operator_token}"}
        view = httpx.get(f"{hub.url}/api/jobs/{job}", headers=headers, timeout=PATIENCE_S).json()
        assert view["state"] == "waiting"
        assert view["reason"] == "needs 3 nodes, 2 are free"
        nodes = httpx.get(f"{hub.url}/api/nodes", headers=headers, timeout=PATIENCE_S).json()
        assert [n["state"] for n in nodes] == ["online"]


def test_many_connections_wait_for_a_busy_hub(tmp_path: Path) -> None:
    """More than are accepted at once, as after a restart of the hub."""
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "runs", reducers=False)
    gate = threading.Event()

    async def busy() -> None:
        gate.wait(PATIENCE_S)

    with HubServer(options) as hub, contextlib.ExitStack() as stack:
        held = threading.Thread(target=lambda: hub.call(busy(), timeout_s=PATIENCE_S))
        held.start()
        try:
            lines = [
                stack.enter_context(socket.create_connection(("127.0.0.1", hub.port), PROMPT_S))
                for _ in range(4 * ACCEPTED_AT_ONCE)
            ]
        finally:
            gate.set()
            held.join()
        for line in lines:
            line.sendall(b"GET /healthz HTTP/1.1\r\nHost: hub\r\n\r\n")
        assert {line.recv(12) for line in lines} == {b"HTTP/1.1 200"}
