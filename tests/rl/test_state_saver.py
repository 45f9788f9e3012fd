"""Saved states of members: exact, durable before anything is reported, the newest wins."""

from __future__ import annotations

import time

import pytest
import torch

from atoll.errors import CheckpointCorrupt, CheckpointError
from atoll.rl.state_saver import StateSaver
from tests.patience import PATIENCE_S, PROMPT_S
from tests.rl.channel.kit import BadLink, alone, hurry, registry, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def test_a_state_comes_back_as_it_was_when_it_was_saved() -> None:
    channel = alone()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    random = torch.Generator().manual_seed(3).get_state()
    state = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": 7,
        "random": random, "names": ["a", ("b", None, 0.5)],
    }  # fmt: skip
    kept = StateSaver(registry(channel, "w1"), member="w1")
    assert kept.newest() is None
    kept.save(state)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()  # what is saved does not change any more
    assert kept.flush()
    kept.close()
    again = StateSaver(registry(channel, "w1"), member="w1")
    found = again.newest()
    assert torch.equal(found["model"]["weight"], before)
    assert found["names"] == ["a", ("b", None, 0.5)]
    assert found["steps"] == 7
    assert torch.equal(found["random"], random)
    adam, saved = optimizer.state_dict()["state"], found["optimizer"]["state"]
    assert all(torch.equal(saved[0][name], adam[0][name]) for name in adam[0])
    assert StateSaver(registry(channel, "w2"), member="w2").newest() is None  # each has its own
    again.close()


def test_callback_runs_only_after_a_durable_save() -> None:
    channel = alone()
    bad = BadLink(channel, loss=2.0)
    kept = StateSaver(registry(channel, "w1"), member="w1")
    kept._topic._outbox._channel = bad  # nothing gets through
    called: list[int] = []
    kept.save({"n": 1}, then=lambda: called.append(1))
    kept.save({"n": 2}, then=lambda: called.append(2))
    until(lambda: bad.requests > 2)
    assert called == []
    assert kept.newest() is None
    assert not kept.flush(timeout_s=0.05)
    kept.save({"n": 3}, then=lambda: called.append(3))
    kept._topic._outbox._channel = channel
    assert kept.flush(timeout_s=PATIENCE_S)
    assert called[-1] == 3
    assert kept.newest() == {"n": 3}
    kept.close()


def test_saving_blocks_no_caller() -> None:
    channel = alone()
    kept = StateSaver(registry(channel, "w1"), member="w1")
    kept._topic._outbox._channel = BadLink(channel, loss=2.0)
    began = time.monotonic()
    for number in range(20):
        kept.save({"n": number, "x": torch.zeros(10_000)})
    assert time.monotonic() - began < PROMPT_S
    kept.close(timeout_s=0.0)


def test_what_cannot_be_saved_or_read_is_named() -> None:
    channel = alone()
    kept = StateSaver(registry(channel, "w1"), member="w1")
    with pytest.raises(CheckpointError, match="state/odd"):
        kept.save({"odd": object()})
    registry(channel, "x").topic("state.w1").publish(b"nonsense")
    with pytest.raises(CheckpointCorrupt):
        kept.newest()
    kept.close()
