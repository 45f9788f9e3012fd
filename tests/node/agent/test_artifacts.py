"""What processes leave behind: files that match go to the hub, nothing else does."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.config import JobSpec, JobTable
from atoll.errors import AuthError, HubUnreachable
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.endpoint import parse_ticket
from atoll.net.http.client import HubClient
from atoll.node.agent import artifacts
from atoll.node.agent.workspace import Workspace
from atoll.wire.messages import Launch, NodeInfo
from tests.patience import PATIENCE_S

INFO = NodeInfo("kitchen", "Linux", "3.11", "0.1.0")
SPEC = '[job]\nname = "letters"\n'


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


@pytest.fixture
def operator(hub: HubServer) -> Iterator[HubClient]:
    with HubClient(hub.url, hub.operator_token) as client:
        yield client


class Place:
    """A node whose process of a job has ended, in a folder of its own."""

    def __init__(self, hub: HubServer, operator: HubClient, folder: Path) -> None:
        self.hub = hub
        self.folder = folder / "work"
        self.folder.mkdir()
        self.lines: list[str] = []
        self.job = operator.submit(SPEC)
        self.node, self.token = self.join("kitchen")
        assert hub.hub is not None
        jobs = hub.hub.stores.jobs
        work = jobs.members.assign(self.job, member="w0", slot=0, node=self.node)
        asyncio.run_coroutine_threadsafe(work, loop_of(hub)).result(PATIENCE_S)

    def join(self, name: str) -> tuple[str, str]:
        with HubClient(self.hub.url) as stranger:
            secret = parse_ticket(self.hub.ticket).secret
            return stranger.join(secret, name=name, info=INFO)[:2]

    def client(self, token: str = "") -> HubClient:
        return HubClient(self.hub.url, token or self.token)

    def write(self, *names: str) -> None:
        for name in names:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)

    def collect(self, *patterns: str, client: Callable[[], HubClient] | None = None) -> list[str]:
        spec = JobSpec(job=JobTable(artifacts=list(patterns)))
        command = Launch(job=self.job, member="w0", slot=0, token="", spec="")
        prepared = Workspace(self.folder, Path(sys.executable))
        work = artifacts.collect(spec, prepared, command, client or self.client, self.lines.append)
        return asyncio.run(work)


def loop_of(hub: HubServer) -> asyncio.AbstractEventLoop:
    assert hub.hub is not None
    (task,) = [task for task in hub.hub.tasks._running if task.get_name() == "housekeeping"]
    return task.get_loop()


@pytest.fixture
def place(hub: HubServer, operator: HubClient, tmp_path: Path) -> Place:
    return Place(hub, operator, tmp_path)


def test_files_that_match_become_files_of_the_job(place: Place, operator: HubClient) -> None:
    place.write("results/a.csv", "results/deep/b.csv", "model.pt", "steps.jsonl", "other.txt")
    names = place.collect("*.csv", "model.pt", "*.jsonl")
    assert names == [
        "artifacts/w0/model.pt", "artifacts/w0/results/a.csv", "artifacts/w0/results/deep/b.csv",
        "artifacts/w0/steps.jsonl",
    ]  # fmt: skip
    assert operator.read_file(place.job, names[1]) == b"results/a.csv"
    assert operator.read_file(place.job, names[3]) == b"steps.jsonl"
    there = {file.name for file in operator.files(place.job)}
    assert {name for name in there if name.startswith("artifacts/")} == set(names)
    assert place.lines == ["[artifacts] 4 files, 0.0 MB"]


def test_without_patterns_nothing_happens(place: Place) -> None:
    place.write("a.csv")
    assert place.collect() == []
    assert place.lines == []


def test_patterns_that_match_nothing_are_told(place: Place) -> None:
    place.write("a.txt")
    assert place.collect("*.csv") == []
    assert place.lines == ["[artifacts] no file matches *.csv"]


def test_links_are_not_followed(place: Place, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "secret.csv").write_text("secret")
    (place.folder / "link.csv").symlink_to(tmp_path / "secret.csv")
    (place.folder / "linked").symlink_to(tmp_path / "folder")
    place.write("a.csv")
    assert place.collect("*.csv") == ["artifacts/w0/a.csv"]


def test_folder_that_became_a_link_leaves_nothing(place: Place, tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id_rsa").write_text("secret")
    place.folder.rmdir()
    place.folder.symlink_to(tmp_path / "keys")
    assert place.collect("*") == []


def test_excess_or_oddly_named_artifacts_are_left_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("a.csv", "b c.csv", "c.csv", "d/e/f/g/h/i/j.csv", "z.csv")
    monkeypatch.setattr(artifacts, "MAX_FILES", 2)
    assert place.collect("*.csv") == ["artifacts/w0/a.csv", "artifacts/w0/c.csv"]
    assert [line.partition(" is left out")[0] for line in place.lines[:-1]] == [
        "[artifacts] 'b c.csv'", "[artifacts] 'd/e/f/g/h/i/j.csv'", "[artifacts] 'z.csv'"
    ]  # fmt: skip
    monkeypatch.setattr(artifacts, "MAX_BYTES", 9)
    assert place.collect("*.csv") == ["artifacts/w0/a.csv"]


def test_a_hub_that_is_away_is_told_and_is_no_failure(place: Place) -> None:
    place.write("a.csv")
    assert place.collect("*.csv", client=lambda: HubClient("http://127.0.0.1:9", "x")) == []
    assert "are not sent" in place.lines[0]


@pytest.mark.parametrize(
    ("pattern", "url"), [("*.csv", "http://127.0.0.1:no-port"), ("[[:alpha:]].csv", "http://h:1")]
)
def test_unusable_hub_or_pattern_is_no_failure(place: Place, pattern: str, url: str) -> None:
    place.write("a.csv")
    assert place.collect(pattern, client=lambda: HubClient(url, "x")) == []
    assert place.lines[0].startswith("[artifacts] the files are not sent: ")


def test_node_writes_only_its_own_processes_artifacts(place: Place) -> None:
    _, stranger = place.join("cellar")
    with place.client() as own, place.client(stranger) as other:
        own.put_file(place.job, "artifacts/w0/a.csv", b"mine")
        for name in ("a.csv", "artifacts/w0", "artifacts/w1/a.csv", "checkpoints/r/x", "job.toml"):
            with pytest.raises(AuthError):
                own.put_file(place.job, name, b"theirs")
        with pytest.raises(AuthError, match="its own processes only"):
            other.put_file(place.job, "artifacts/w0/a.csv", b"theirs")


def test_it_ends_when_it_is_cancelled(place: Place) -> None:
    place.write("a.csv", "b.csv")
    entered, go_on = threading.Event(), threading.Event()

    class Slow(HubClient):
        def put_file(self, job: str, path: str, source: Path | bytes, **more: object) -> str:
            entered.set()
            go_on.wait(PATIENCE_S)
            raise HubUnreachable("cut")

    async def test() -> None:
        spec = JobSpec(job=JobTable(artifacts=["*.csv"]))
        command = Launch(job=place.job, member="w0", slot=0, token="", spec="")
        prepared = Workspace(place.folder, Path(os.sep))
        task = asyncio.create_task(
            artifacts.collect(
                spec, prepared, command, lambda: Slow(place.hub.url, "x"), place.lines.append
            )
        )
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(test(), 20))
