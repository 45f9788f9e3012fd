"""What is not trained, frozen parameters and counts: in checkpoints and in the host model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from atoll.checkpoint.sharded import (
    ShardedInfo,
    Trained,
    export_sharded,
    load_sharded,
    save_sharded,
)
from atoll.checkpoint.state.sharded_state import ties_of
from atoll.strategies.inner.sharded_optimizer import LocalShard
from tests.island.leading import MODELS as LED
from tests.island.leading import Member, led, table
from tests.island.pool import Ranks
from tests.island.reference import FEATURES, Perceptron, batch_for, divided, gpt, gradients, whole

SQUARE = {"replicate": 2, "shard": 2}


def half(seed: int) -> Any:
    """Return layers of which the middle one is frozen, and a norm that counts its batches."""
    torch.manual_seed(seed)
    middle = nn.Linear(8, 8).requires_grad_(False)
    layers = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), middle, nn.Linear(8, 2)]
    return Perceptron(*layers).double()


def body(seed: int) -> Any:
    """Return a GPT whose embedding, which is the output layer, and first block are frozen."""
    model = gpt(vocab_size=18)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


KINDS: Mapping[str, Any] = {"half": half, "body": body}


class Held:
    """What a rank has of such a model, with an optimizer of what is trained."""

    def __init__(self, kind: str, axes: Mapping[str, int], *, seed: int) -> None:
        model = KINDS[kind](seed)
        self.batch, self.ties = batch_for(model), ties_of(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        groups = [[name for name, p in model.named_parameters() if p.requires_grad]]
        optimizer.param_groups[0]["params"] = []
        self.parts = divided(model, axes)
        self.own = LocalShard(optimizer, self.parts.parameters(), groups=groups, state={})

    def state(self) -> dict[str, Tensor]:
        """Return everything that is here, gathered."""
        parts = self.parts
        found = {**parts.parameters(), **parts.buffers(), **parts.untrained()}
        return {name: _plain(tensor) for name, tensor in found.items()}


def _plain(tensor: Tensor) -> Tensor:
    found = whole(tensor.detach())
    assert found is not None
    return found.clone()


def _save(kind: str, folder: Path, axes: Mapping[str, int]) -> Any:
    held = Held(kind, axes, seed=1)
    loss = held.parts.backward(*held.batch)
    found = gradients(held.parts)
    held.own.step()
    save_sharded(
        folder,
        1,
        Trained(held.parts, held.own.optimizer, steps_on=held.own.steps_on),
        ShardedInfo(1, ties=held.ties),
    )
    return loss.item(), found, held.state()


def _load(kind: str, folder: Path, axes: Mapping[str, int]) -> dict[str, Tensor]:
    held = Held(kind, axes, seed=2)
    load_sharded(folder, 1, Trained(held.parts, held.own.optimizer, steps_on=held.own.steps_on))
    return held.state()


def _together(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return what all ranks have, which have to agree where they have the same."""
    together: dict[str, Tensor] = {}
    for each in found:
        for name, tensor in each.items():
            assert torch.equal(together.setdefault(name, tensor), tensor), name
    return together


@pytest.mark.parametrize(
    ("kind", "first", "others"),
    [
        ("half", SQUARE, [{"pipeline": 2}, {"shard": 2}, {}]),
        ("body", {"pipeline": 2, "shard": 2}, [{"tensor": 2}, {"replicate": 2}]),
        ("body", {"tensor": 2}, [{"pipeline": 2}, {}]),
    ],
)
@pytest.mark.every(2)
def test_what_is_frozen_is_saved_and_loaded_under_any_mesh(
    ranks: Ranks, tmp_path: Path, kind: str, first: dict[str, int], others: list[dict[str, int]]
) -> None:
    told = ranks.run(_count(first), _save, kind, tmp_path, first)
    before = _together([state for _, _, state in told])
    plain = KINDS[kind](1)
    loss = plain.loss(*batch_for(plain))
    loss.backward()
    if kind == "body":  # a norm over a batch sees other rows on every rank
        assert told[0][0] == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in _together([found for _, found, _ in told]).items():
            torch.testing.assert_close(
                gradient, plain.get_parameter(name).grad, rtol=1e-9, atol=1e-12
            )
    assert before.keys() == plain.state_dict().keys() - ties_of(plain).keys()
    for axes in others:
        after = _together(ranks.run(_count(axes), _load, kind, tmp_path, axes))
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), axes
    export_sharded(tmp_path, 1, tmp_path / "x.safetensors")
    other = KINDS[kind](3)
    other.load_state_dict(load_file(tmp_path / "x.safetensors"))
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in before.items())


def _count(axes: Mapping[str, int]) -> int:
    return torch.tensor([1, *axes.values()]).prod().item()  # type: ignore[return-value]


# --------------------------------------------------------------------------------- the host model


def _pictured(axes: dict[str, int]) -> Any:
    """Change what is frozen in the host model, and train; return what ranks and host model have."""
    LED["half"] = lambda: half(1)  # type: ignore[index]
    keep: list[Any] = []
    sent: list[int] = []

    def use(member: Member) -> dict[str, Tensor]:
        model, rest = member.task.model, keep[0]._untrained
        deal = rest._frozen.deal

        def counted(picture: Any) -> None:
            sent.append(1)
            deal(picture)

        rest._frozen.deal = counted
        member.task.push()
        with torch.no_grad():
            model[3].weight.fill_(0.25)  # type: ignore[index]
        member.task.push()
        member.train(3)
        member.task.pull()
        member.task.push()
        return {name: t.clone() for name, t in model.state_dict().items()}

    picture = led(use, "half", table(lr=0.01), axes, keep)
    parts = keep[0]._parts
    here = {**parts.parameters(), **parts.buffers(), **parts.untrained()}
    return picture, {name: _plain(tensor) for name, tensor in here.items()}, len(sent)


@pytest.mark.parametrize("axes", [SQUARE, {"pipeline": 2}], ids=lambda axes: " ".join(axes))
def test_frozen_parameters_are_sent_only_after_a_change(ranks: Ranks, axes: dict[str, int]) -> None:
    told = ranks.run(_count(axes), _pictured, axes)
    picture, _, sent = told[0]
    assert sent == 1, "pushed three times, changed once"
    here = _together([state for _, state, _ in told])
    assert bool((here["3.weight"] == 0.25).all())
    assert int(picture["1.num_batches_tracked"]) > 0
    for name, tensor in here.items():
        assert torch.equal(picture[name], tensor), name
