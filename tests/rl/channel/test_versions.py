"""Versions of weights travel as patches between programs at a real hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.codec.sparse.patches import digest_of
from atoll.errors import ConfigError, WireError
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.rl.channel.versions import WeightReceiver, WeightSender, sampling_weights
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    options = HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


@pytest.fixture
def client(hub: HubServer, tmp_path: Path) -> Iterator[atoll.client.Client]:
    with HubClient(hub.url, hub.operator_token) as operator:
        ticket = operator.create_ticket(role="program", uses=1, valid_s=600.0, name="", quotas={})
    with atoll.connect(ticket, home=tmp_path / "home") as made:
        yield made


class Trainer:
    """Weights that move as in training at a small rate."""

    def __init__(self) -> None:
        self.draws = torch.Generator().manual_seed(5)
        self.master = torch.randn(40_000, generator=self.draws) * 0.05

    def step(self) -> dict[str, Tensor]:
        sign = torch.sign(torch.randn(len(self.master), generator=self.draws))
        self.master = self.master + 1e-6 * sign
        return {"w": self.master.to(torch.bfloat16), "steps": torch.tensor([1])}


def test_workers_follow_and_may_come_at_any_time(client: atoll.client.Client) -> None:
    topic = client.topic("pool/follow", max_items=30)
    trainer, sender = Trainer(), WeightSender(topic, whole_every=5)
    early = WeightReceiver(topic, "early")
    assert not early.receive()
    sizes = []
    for number in range(13):
        weights = trainer.step()
        sizes.append(sender.send(weights))
        if number % 3 == 0:
            assert early.receive(wait_s=PATIENCE_S)
            assert early.version == number
            assert digest_of(early.weights) == digest_of(weights) == sender.digest
    late = WeightReceiver(topic, "late")  # as a worker that was killed and started again
    assert late.receive(wait_s=PATIENCE_S)
    assert (late.version, late.digest) == (12, sender.digest)
    whole = {number for number, nbytes in enumerate(sizes) if nbytes > 70_000}
    assert whole == {0, 5, 10}
    assert max(nbytes for number, nbytes in enumerate(sizes) if number not in whole) < 80_000 / 20


def test_a_restarted_trainer_begins_with_a_whole_version(client: atoll.client.Client) -> None:
    topic = client.topic("pool/restart", max_items=30)
    trainer, worker = Trainer(), WeightReceiver(topic, "worker")
    WeightSender(topic, whole_every=100).send(trainer.step(), version=7)
    assert worker.receive(wait_s=PATIENCE_S)
    second = WeightSender(topic, whole_every=100)
    second.send(trainer.step(), version=8)
    second.send(trainer.step(), version=9)
    while worker.version < 9:
        assert worker.receive(wait_s=PATIENCE_S)
    assert worker.digest == second.digest
    assert worker.skipped == 0


def test_a_missed_patch_is_healed_by_the_next_whole_version(
    client: atoll.client.Client,
) -> None:
    topic = client.topic("pool/slow", max_items=3)  # drops what a slow worker has not read
    trainer, sender = Trainer(), WeightSender(topic, whole_every=8)
    worker = WeightReceiver(topic, "slow")
    sender.send(trainer.step())
    assert worker.receive(wait_s=PATIENCE_S)
    for _ in range(6):
        sender.send(trainer.step())
    worker.receive()
    assert (worker.version, worker.skipped) == (0, 3)
    while sender.version < 8:
        sender.send(trainer.step())
    while worker.version < 8:
        assert worker.receive(wait_s=PATIENCE_S)
    assert worker.digest == sender.digest


def test_whole_versions_of_a_known_start_are_patches(client: atoll.client.Client) -> None:
    topic, trainer = client.topic("pool/known", max_items=30), Trainer()
    start = {"w": trainer.master.to(torch.bfloat16), "steps": torch.tensor([1])}
    copied = {name: tensor.clone() for name, tensor in start.items()}
    sender = WeightSender(topic, whole_every=4, start=start)
    early = WeightReceiver(topic, "early", start=copied)
    sizes = [sender.send(trainer.step()) for _ in range(6)]
    late = WeightReceiver(topic, "late", start=copied)
    for receiver in (early, late):
        assert receiver.receive(wait_s=PATIENCE_S)
        assert (receiver.version, receiver.digest, receiver.skipped) == (5, sender.digest, 0)
        assert digest_of(receiver.weights) == sender.digest
    assert digest_of(copied) == digest_of(start), "the start stays as it is"
    assert max(sizes) < 80_000 / 10
    again = WeightSender(topic, whole_every=4, start=start)  # it went back, as after a kill
    again.send(trainer.step(), version=2)
    assert early.receive(wait_s=PATIENCE_S)
    assert (early.version, early.digest) == (2, again.digest)
    for other in ({}, {"w": copied["w"] + 1, "steps": copied["steps"]}):
        with pytest.raises(WireError, match="started from other weights"):
            WeightReceiver(topic, "other", start=other).receive(wait_s=PATIENCE_S)


def test_steps_as_numbers_have_whole_versions_too(client: atoll.client.Client) -> None:
    topic, trainer = client.topic("pool/steps", max_items=30), Trainer()
    sender = WeightSender(topic, whole_every=4)
    sizes = [sender.send(trainer.step(), version=25 * n + 1) for n in range(9)]
    assert [n for n, nbytes in enumerate(sizes) if nbytes > 70_000] == [0, 4, 8]


def test_numbers_of_versions_grow(client: atoll.client.Client) -> None:
    sender = WeightSender(client.topic("pool/numbers"))
    sender.send({"w": torch.zeros(3)}, version=4)
    with pytest.raises(ConfigError, match="versions grow"):
        sender.send({"w": torch.zeros(3)}, version=4)
    with pytest.raises(ConfigError, match="whole versions"):
        WeightSender(client.topic("pool/numbers"), whole_every=0)


def test_sampling_weights_are_copies_without_tied_ones() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    linear = model[1]
    assert isinstance(linear, nn.Linear)
    linear.weight = model[0].weight  # type: ignore[assignment]
    found = sampling_weights(model)
    assert list(found) == ["0.weight"]
    assert found["0.weight"].dtype == torch.bfloat16
    with torch.no_grad():
        linear.weight.zero_()
    assert found["0.weight"].abs().sum() > 0
