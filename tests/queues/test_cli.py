"""`atoll queue` against a real hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import hub_access
from atoll.cli.main import main
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.queues import QueueRegistry
from tests.queues.conftest import channel_to


@pytest.fixture
def client(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubClient:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    hub_access.remember(hub_access.KnownHub(hub.url, hub.operator_token, operator=True))
    return HubClient(hub.url, hub.operator_token)


def atoll(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["queue", *words])
    return int(str(ended.value.code or 0))


def kill_an_item(client: HubClient, queue: str, *, times: int = 5) -> None:
    for _ in range(times):
        (item,) = client.queue_claim(queue, lease_s=60.0)
        client.queue_release(queue, lease=item.lease, reason="it is bad")


def test_a_person_sees_queues_and_deals_with_dead_letters(
    client: HubClient, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with client:
        assert atoll("put", "cli/work", '{"a": 1}', "--key", "k") == 0
        assert atoll("put", "cli/work", "again", "--key", "k") == 0
        assert "was there already" in capsys.readouterr().out
        kill_an_item(client, "cli/work")
        assert atoll("list") == 0
        assert atoll("dead", "cli/work") == 0
        out = capsys.readouterr().out
        assert "cli/work" in out
        assert "it is bad" in out
        assert "{'a': 1}" in out
        (letter,) = client.dead_letters("cli/work")
        assert atoll("requeue", "cli/work", str(letter["seq"])) == 0
        assert "1 of cli/work are ready again" in capsys.readouterr().out
        with channel_to(hub, "job/w9", tmp_path) as channel:
            (item,) = QueueRegistry(channel, prefix="cli", reader="w9").queue("work").claim()
            assert (item.value, item.attempt) == ({"a": 1}, 1)
            item.release()
        kill_an_item(client, "cli/work", times=4)
        assert atoll("discard", "cli/work", "--all") == 0
        assert client.dead_letters("cli/work") == []
        capsys.readouterr()
        assert atoll("show", "cli/work", "--json") == 0
        assert json.loads(capsys.readouterr().out)["dead"] == 0


def test_mistakes_are_explained(client: HubClient, capsys: pytest.CaptureFixture[str]) -> None:
    with client:
        client.queue_put("cli/experience", key="a", payload=b"")
        assert atoll("show", "cli/experiense") == 2
        assert "did you mean 'cli/experience'" in capsys.readouterr().err
        assert atoll("requeue", "cli/experience") == 2
        assert "--all" in capsys.readouterr().err
