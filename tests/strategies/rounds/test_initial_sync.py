"""All members start with the first one's whole state, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from atoll.codec.registry import make_codec
from atoll.errors import AtollError, ConfigError, GroupError, PeerLost
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.period import PeriodReport
from atoll.reducer.mean import Share, mean_of, total_weight
from atoll.run import Run
from atoll.run.place import Membership
from atoll.strategies.rounds.initial_sync import half_bytes
from atoll.wire.messages import RoundPlan

DTYPES = (torch.float64, torch.complex64, torch.bfloat16, torch.int64, torch.bool)


class Mixed(nn.Module):
    """A trained layer; frozen parameters and buffers of every kind; different for every seed."""

    def __init__(self, seed: int, *, width: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layer = nn.Linear(width, 2)
        self.norm = nn.BatchNorm1d(2)
        for number, dtype in enumerate(DTYPES):
            noise = torch.randn(5, generator=generator)
            values = (noise * 3).to(dtype) if dtype != torch.bool else noise > 0
            if values.is_floating_point() or values.is_complex():
                self.register_parameter(f"frozen{number}", nn.Parameter(values, False))
            else:
                self.register_buffer(f"kept{number}", values)
        self.register_buffer("mask", torch.tensor([float("-inf"), -0.0, float("nan"), seed]))
        self.norm.get_buffer("num_batches_tracked").add_(seed)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(2, width, generator=generator))
            self.layer.bias.copy_(torch.randn(2, generator=generator))


def bits(tensor: Tensor) -> bytes:
    found: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def wrapped(group: Group, folder: Path, *, outer: str, model: nn.Module) -> dict[str, bytes]:
    run = Run(group, Membership(folder, slot=int(group.me[1:]), num_slots=2))
    trained = [p for p in model.parameters() if p.requires_grad]
    run.wrap(model, torch.optim.SGD(trained, 0.1), outer=outer)
    return {name: bits(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("outer", ["diloco", "ddp", "d-psgd", "async-sgd", "eager-diloco"])
def test_every_tensor_becomes_the_first_members(outer: str, tmp_path: Path) -> None:
    found = MemoryGroups(3).together(
        lambda group: wrapped(group, tmp_path, outer=outer, model=Mixed(int(group.me[1:])))
    )
    expected = {name: bits(value) for name, value in Mixed(0).state_dict().items()}
    for member in found:
        assert member == expected


def test_different_models_are_refused(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        model = Mixed(0, width=3 + int(group.me[1:]))
        with pytest.raises(ConfigError, match="do not start with the same model"):
            wrapped(group, tmp_path, outer="diloco", model=model)

    MemoryGroups(2).together(body)


def test_under_a_robust_policy_a_frozen_parameter_counts_too(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        frozen, trained = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
        model = nn.Sequential(frozen, trained)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        nn.init.constant_(frozen.weight, 1.0 if group.me != "w2" else 2.0)
        run = Run(group, Membership(tmp_path, slot=int(group.me[1:]), num_slots=3))
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        try:
            run.wrap(model, optimizer, outer="diloco", aggregate="trimmed:1")
        except GroupError as error:
            return str(error)
        return ""

    found = MemoryGroups(3).together(body)
    assert [bool(text) for text in found] == [False, False, True]
    assert "starts from other parameters than most" in found[2]


def test_equal_digests_of_ten_thousand_members_are_equal() -> None:
    codec, mark = make_codec("fp32"), half_bytes(bytes([255, 241, 97, 1]))
    packet = codec.encode(torch.cat([mark, mark.square()]))
    shares = [Share(f"w{number}", packet, 1.0) for number in range(10_000)]
    mean, squares = codec.decode(mean_of(shares, codec=codec).packet).chunk(2)
    assert torch.equal(mean, mark)
    assert torch.equal(mean.square(), squares)


def test_a_lost_leader_is_replaced_whatever_the_error_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reworded(shares: Sequence[Share], left_out: dict[str, AtollError]) -> float:
        try:
            return total_weight(shares, left_out)
        except GroupError:
            raise GroupError("other words") from None

    monkeypatch.setattr("atoll.reducer.mean.total_weight", reworded)
    groups = MemoryGroups(3)

    def body(group: Group) -> dict[str, bytes]:
        joins, join = 0, group.join

        def counted(report: PeriodReport) -> RoundPlan:
            nonlocal joins
            joins += 1
            if joins == 2:  # the round in which it gives its values
                groups.kill("w0", at="send")
            return join(report)

        if group.me == "w0":
            group.join = counted  # type: ignore[assignment,method-assign]
        return wrapped(group, tmp_path, outer="diloco", model=Mixed(int(group.me[1:])))

    lost, *found = groups.run(body)
    assert isinstance(lost, PeerLost)
    expected = {name: bits(value) for name, value in Mixed(1).state_dict().items()}
    assert found == [expected, expected]
