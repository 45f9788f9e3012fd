"""Jobs over REST: batches, keys, bounds, and what a view shows of placing and failing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.errors import ConfigError, HubError
from atoll.hub.http.jobs import text_for_viewers
from atoll.hub.jobs.record import Job
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.wire.messages import Done, ProcessState
from atoll.wire.states import ProcessPhase
from tests.hub.membership import launches, options
from tests.hub.peer import node
from tests.patience import PATIENCE_S
from tests.security.conftest import login

COMMAND = '[job]\nname = "c"\ncommand = ["true"]\npriority = 3\n'


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[HubClient]:
    with HubClient(hub.url, hub.operator_token) as made:
        yield made


def test_submission_with_a_key_creates_one_job(
    client: HubClient,
) -> None:
    first = client.submit(COMMAND, batch="four", key="mine")
    assert client.submit(COMMAND, batch="four", key="mine") == first
    assert client.submit(COMMAND) != client.submit(COMMAND)
    assert len(client.jobs()) == 3
    view = client.job(first)
    assert (view["batch"], view["priority"], view["kind"]) == ("four", 3, "command")
    with pytest.raises(ConfigError, match="another submission"):
        client.submit(COMMAND.replace("true", "false"), key="mine")


def test_code_that_the_hub_does_not_have_is_asked_for(client: HubClient) -> None:
    spec = COMMAND + 'code = "sha256:{}"\n'
    with pytest.raises(HubError, match="does not have this blob"):
        client.submit(spec.format("0" * 64))
    assert client.submit(spec.format(client.put_blob(b"packed")))


def test_bounds_are_changed_and_wrong_ones_refused(client: HubClient) -> None:
    job = client.submit(COMMAND)
    client.scale(job, least=2, most=5)
    view = client.job(job)
    assert (view["min_nodes"], view["nodes_wanted"]) == (2, 5)
    with pytest.raises(ConfigError, match="cannot have so many"):
        client.scale(job, least=6, most=5)


def test_view_of_a_failed_job_tells_where_how_and_its_last_lines(
    hub: HubServer, client: HubClient
) -> None:
    with node(hub, "lap1") as agent:
        job = client.submit(COMMAND)
        launches(agent, 1)
        error = {"kind": "ScriptError", "what": "w0 ended with exit status 3", "remedy": "look"}
        lines = [f"line {n}" for n in range(30)]
        report = ProcessState(
            job, "w0", ProcessPhase.EXITED, exit_code=3, error=error, tail=lines, attempt=1
        )
        assert isinstance(agent.request(report), Done)
        view = client.job(job)
    assert (view["state"], view["exit_code"], view["places"]) == ("failed", 3, ["lap1"])
    assert (view["failed_member"], view["failed_node"]) == ("w0", "lap1")
    assert view["last_lines"] == lines[-20:]
    fields = {"member": "w0", "node": "lap1", "exit_code": 3, "last_lines": lines[-20:]}
    assert view["error"] == error | fields


def test_long_poll_returns_next_event_or_times_out(hub: HubServer, client: HubClient) -> None:
    job = client.submit(COMMAND)
    last = client.events(job)["last"]
    assert client.events(job, after=last, wait_s=0.05) == {"last": last, "events": []}
    with ThreadPoolExecutor(1) as thread, HubClient(hub.url, hub.operator_token) as other:
        pending = thread.submit(lambda: other.events(job, after=last, wait_s=50.0))
        client.stop(job, grace_s=0.0)
        kinds = [event["kind"] for event in pending.result(timeout=PATIENCE_S)["events"]]
    assert kinds[0] in ("stopping", "stopped")


def test_viewers_see_no_secrets_and_no_job_file_is_parsed(
    hub: HubServer, client: HubClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = client.submit(COMMAND + '[launch]\nenv = ["NAME=value-42"]\n')
    parsed: list[str] = []
    monkeypatch.setattr("atoll.config.writing.parse_spec", parsed.append)
    with HubClient(hub.url, login(hub, "viewer")) as viewer:
        shown = [viewer.job(job)["spec"], *(view["spec"] for view in viewer.jobs())]
        assert viewer.jobs(brief=True)[0]["job"] == job
    assert not parsed
    assert len(shown) == 2
    assert all("NAME=(hidden)" in text and "value-42" not in text for text in shown)


def test_viewers_see_nothing_of_a_file_that_cannot_be_read() -> None:
    text = '[job]\nnods = 2\n[launch]\nenv = ["NAME=value-42"]\n'
    assert "value-42" not in text_for_viewers(Job(job="job-1", created=0.0, text=text))
