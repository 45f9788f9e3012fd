"""Secrets of users: encrypted where they lie, given to processes of their job, shown nowhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cli.jobs.jobfile import Submission
from atoll.cli.jobs.submit import find_secrets
from atoll.clock import RealClock
from atoll.config import JobSpec, JobTable, LaunchTable, dump_spec
from atoll.errors import ConfigError, HubError
from atoll.hub.security.secrets import KEY_FILE
from atoll.hub.server import HubServer
from atoll.hub.storage.backup import take
from atoll.net.endpoint import HubEndpoint
from atoll.net.http.client import HubClient
from tests.node.running import Node, lines_of, wait_for
from tests.security.conftest import login, operator, serving, stores_of
from tests.security.test_commands import command, operators_home

KEY = "sk-live-0123456789"
SCRIPT = """
import os
print("length", len(os.environ["SERVICE"]), os.environ["SERVICE"], flush=True)
print(os.environ["SERVICE"][:6] + "...", end="", flush=True)
raise RuntimeError("401 for " + os.environ["SERVICE"])
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with serving(tmp_path / "hub", tls="on") as server:
        yield server


def job_with(*secrets: str) -> str:
    job = JobTable(name="job", script="s.py", nodes=1)
    return dump_spec(JobSpec(job=job, launch=LaunchTable(secrets=list(secrets))))


def holding(folder: Path, value: str) -> list[Path]:
    """Return the files below a folder that contain a text."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if value.encode() in path.read_bytes()]


def test_a_process_gets_it_and_nobody_sees_it(hub: HubServer, tmp_path: Path) -> None:
    with operator(hub) as client:
        client.set_secret("TEAM_KEY", KEY)
        name = client.submit(job_with("SERVICE=TEAM_KEY"), files={"s.py": SCRIPT})
        node = Node(hub.ticket, tmp_path / "home")
        try:
            view = wait_for(client, name, "failed")
        finally:
            node.end()
        lines = lines_of(client, name)
        assert f"length {len(KEY)} (secret TEAM_KEY)" in lines, lines
        assert "401 for (secret TEAM_KEY)" in str(view)
        assert KEY not in str((view, lines, client.events(name), client.audit()))
    assert holding(tmp_path, KEY) == [], "neither at the hub nor at the node"


def test_who_may_not_read_does_not(hub: HubServer) -> None:
    with operator(hub) as client:
        client.set_secret("TEAM_KEY", KEY)
        with pytest.raises(ConfigError, match="unknown secret") as refused:
            client.submit(job_with("OTHER"), files={"s.py": SCRIPT})
        assert "atoll secret set OTHER" in str(refused.value)
        mine = client.submit(job_with("TEAM_KEY"), files={"s.py": SCRIPT})
        none = client.submit(job_with(), files={"s.py": SCRIPT})
        (shown,) = client.secrets()
        assert sorted(shown) == ["changed", "changed_by", "name"]
        with pytest.raises(HubError):
            client.secrets_of(mine)  # an operator, but not the job
    issue = stores_of(hub).auth.issue_job_token
    tokens = {job: hub.call(issue(job)) for job in (mine, none)}
    with HubClient(hub.url, tokens[mine], endpoint=HubEndpoint(ca=hub.ca)) as process:
        assert process.secrets_of(mine) == {"TEAM_KEY": KEY}
        with pytest.raises(HubError):
            process.secrets_of(none)
    with HubClient(hub.url, tokens[none], endpoint=HubEndpoint(ca=hub.ca)) as process:
        assert process.secrets_of(none) == {}
    viewer = HubClient(hub.url, login(hub, "viewer"), endpoint=HubEndpoint(ca=hub.ca))
    with viewer, pytest.raises(HubError):
        viewer.secrets()


def test_a_copy_of_the_database_is_not_enough(hub: HubServer, tmp_path: Path) -> None:
    """Nor can one row be put in the place of another; a backup has no key."""
    store = stores_of(hub).secrets
    data = tmp_path / "hub" / "data"
    for name, value in (("ONE", KEY), ("TWO", "another-value")):
        hub.call(store.set(name, value, by="olga"))
    assert (data / KEY_FILE).stat().st_mode & 0o777 == 0o600
    taken = take(tmp_path / "backup", data=data, clock=RealClock())
    assert holding(taken.path, KEY) == []
    assert not list(taken.path.rglob(KEY_FILE))

    def swap(connection: sqlite3.Connection) -> None:
        connection.execute(
            "UPDATE secrets SET sealed = (SELECT sealed FROM secrets WHERE name = 'ONE')"
        )

    stores_of(hub).database.write_now(swap)
    assert hub.call(store.values(["ONE"])) == {"ONE": KEY}
    with pytest.raises(HubError, match="TWO cannot be read"):
        hub.call(store.values(["TWO"]))
    (data / KEY_FILE).unlink()
    with pytest.raises(HubError, match="no key") as lost:
        hub.call(store.values(["ONE"]))
    assert "atoll secret list" in str(lost.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("A-B", KEY), ("", KEY), ("ATOLL_X", KEY), ("A", "short"), ("A", "a" * 70_000)],
)
def test_names_and_values_have_a_form(hub: HubServer, name: str, value: str) -> None:
    with pytest.raises(ConfigError):
        hub.call(stores_of(hub).secrets.set(name, value, by="olga"))
    assert hub.call(stores_of(hub).secrets.listing()) == []


def test_commands_set_list_and_delete(hub: HubServer, tmp_path: Path) -> None:
    olga = operators_home(hub, tmp_path / "olga")
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert "HF_TOKEN is stored" in command(olga, "secret", "set", "HF_TOKEN", "--file", str(file))
    shown = command(olga, "secret", "list")
    assert "HF_TOKEN" in shown
    assert "olga" in shown
    assert KEY not in shown
    assert hub.call(stores_of(hub).secrets.values(["HF_TOKEN"])) == {"HF_TOKEN": KEY}
    command(olga, "secret", "rm", "HF_TOKEN")
    assert "no secrets" in command(olga, "secret", "list")
    assert "unknown secret" in command(olga, "secret", "rm", "HF_TOKEN", status=2)
    assert "HF_TOKEN" in command(olga, "audit")


def test_a_local_run_takes_them_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec(launch=LaunchTable(secrets=["SERVICE=HF_TOKEN"]))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        find_secrets([Submission(spec, {})])
    monkeypatch.setenv("HF_TOKEN", KEY)
    assert find_secrets([Submission(spec, {})]) == {"HF_TOKEN": KEY}
