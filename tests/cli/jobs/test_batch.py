"""Several jobs at once: what is done when one has ended is done again if the hub was away."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli.jobs import batch
from atoll.cli.jobs.interrupts import Interrupts
from atoll.cli.views.job import Watched
from atoll.errors import HubUnreachable
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient

COMMAND = '[job]\nname = "c"\ncommand = ["true"]\n'


@pytest.fixture
def client(tmp_path: Path) -> Iterator[HubClient]:
    options = HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs")
    with HubServer(options) as hub, HubClient(hub.url, hub.operator_token) as made:
        yield made


def follow(client: HubClient, jobs: list[str], fetch: Fetch, *, away_s: float) -> list[Watched]:
    console = Console(file=io.StringIO())
    return batch.follow_batch(
        client, jobs, console=console, interrupts=Interrupts(), away_s=away_s, on_end=fetch
    )


class Fetch:
    """Fetches results, from a hub that goes away a number of times."""

    def __init__(self, *, failures: int) -> None:
        self._failures = failures
        self.fetched: list[str] = []

    def __call__(self, ended: Watched) -> None:
        if self._failures:
            self._failures -= 1
            raise HubUnreachable("the hub is away")
        self.fetched.append(ended.job)


def test_results_are_fetched_when_the_hub_is_back(
    client: HubClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "REFRESH_S", 0.01)
    jobs = [client.submit(COMMAND) for _ in range(2)]
    for job in jobs:
        client.stop(job, grace_s=0.0)
    fetch = Fetch(failures=2)
    watched = follow(client, jobs, fetch, away_s=3600.0)
    assert fetch.fetched == jobs
    assert all(one.ended for one in watched)
    with pytest.raises(HubUnreachable):
        follow(client, jobs, Fetch(failures=1), away_s=-1.0)
