"""Checkpoints at a real hub: uploaded, announced, published, fetched, checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll.checkpoint import SHARED, HubStore, Part, SavePoint, member_part
from atoll.checkpoint.files import hash_file
from atoll.errors import CheckpointCorrupt, CheckpointMissing, HubUnreachable
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.wire.manifest import MANIFEST_NAME, checkpoint_folder
from atoll.wire.messages import CheckpointPart, CheckpointState
from tests.hub.membership import Running
from tests.hub.rounds.test_checkpoints import commit

MEMBERS = ("w0", "w1")
NAMES = {SHARED, "w0.safetensors", "w1.safetensors"}


class Site:
    """A hub, a running job of two members, and a store for each."""

    def __init__(self, folder: Path) -> None:
        options = HubOptions(data=folder / "data", jobs=folder / "runs", reducers=False)
        self.server = HubServer(options)
        self.server.__enter__()
        self.running = Running(self.server)
        tokens = [launch.token for launch in self.running.launches]
        self.clients = [HubClient(self.server.url, token) for token in tokens]
        self.scratch = [folder / f"scratch{slot}" for slot in range(2)]
        self.stores = [
            self.store(self.clients[slot], slot, scratch=self.scratch[slot]) for slot in range(2)
        ]

    def store(self, client: HubClient, slot: int, *, scratch: Path) -> HubStore:
        def publish(part: CheckpointPart) -> bool:
            answer = self.running.members[slot].request(part)
            assert isinstance(answer, CheckpointState), answer
            return answer.published

        job = self.running.job
        return HubStore(client, job, publish=publish, scratch=scratch, retry_s=0.3)

    def put(self, slot: int, round_: int, *, value: float = 1.0) -> bool:
        own = Part(member_part(f"w{slot}"), {"v": torch.full((5,), value + slot)})
        shared = Part(SHARED, {"model/v": torch.full((50_000,), value)})
        parts = [own] if slot else [shared, own]
        return self.stores[slot].put(SavePoint(round_, 10 * round_, f"w{slot}", MEMBERS), parts)

    def folder(self, round_: int) -> Path:
        assert self.server.hub is not None
        jobs = self.server.hub.stores.jobs
        return jobs.folder(self.running.job) / checkpoint_folder(round_)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.running.close()
        self.server.__exit__(None, None, None)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    opened = Site(tmp_path)
    yield opened
    opened.close()


def test_checkpoint_is_complete_with_the_last_members_part(site: Site) -> None:
    commit(site.running, 0, site.running.members)
    assert not site.put(0, 1)
    assert site.stores[0].latest() == -1
    with pytest.raises(CheckpointMissing, match=r"round 1; .*no round has one yet"):
        site.stores[0].get(1, names=NAMES)
    assert site.put(1, 1)
    for store in site.stores:
        assert store.latest() == 1
        assert store.manifest(1).members == ["w0", "w1"]
        found = store.get(1, names=NAMES)
        assert set(found) == NAMES
        assert found[SHARED].tensors["model/v"].tolist() == [1.0] * 50_000
        assert found["w1.safetensors"].tensors["v"].tolist() == [2.0] * 5
        assert set(store.get(1, names={"w1.safetensors"})) == {"w1.safetensors"}
    assert [list(folder.iterdir()) for folder in site.scratch] == [[], []]


def test_published_checkpoint_is_never_written_again(site: Site) -> None:
    commit(site.running, 0, site.running.members)
    site.put(0, 1)
    site.put(1, 1)
    before = hash_file(site.folder(1) / SHARED)
    assert site.put(0, 1, value=9.0)
    assert hash_file(site.folder(1) / SHARED) == before
    site.stores[0].get(1, names=NAMES)


@pytest.mark.parametrize("part", sorted(NAMES))
def test_damage_at_the_hub_is_named(site: Site, part: str) -> None:
    commit(site.running, 0, site.running.members)
    site.put(0, 1)
    site.put(1, 1)
    path = site.folder(1) / part
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=part):
        site.stores[1].get(1, names=NAMES)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointCorrupt, match=part):
        site.stores[1].get(1, names=NAMES)
    path.unlink()
    with pytest.raises(CheckpointCorrupt, match=f"part {part} .* is missing"):
        site.stores[1].get(1, names=NAMES)


def test_damaged_manifest_at_the_hub_is_named(site: Site) -> None:
    commit(site.running, 0, site.running.members)
    site.put(0, 1)
    site.put(1, 1)
    (site.folder(1) / MANIFEST_NAME).write_bytes(b"{}")
    with pytest.raises(CheckpointCorrupt, match="manifest"):
        site.stores[1].get(1, names=NAMES)


def test_hub_that_is_gone_is_told_after_a_while(site: Site, tmp_path: Path) -> None:
    with HubClient("http://127.0.0.1:9", "token") as client:
        store = site.store(client, 0, scratch=tmp_path / "s")
        with pytest.raises(HubUnreachable):
            store.latest()
