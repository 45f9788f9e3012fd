"""The host model shows what the ranks have to the last bit; so does the state of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.strategies.inner.host_model import HostModelOnDisk
from tests.island.leading import Member, by_itself, count_calls, led, same, table
from tests.island.pool import Ranks

SQUARE = {"replicate": 2, "shard": 2}
MESHES: list[dict[str, int]] = [
    {"replicate": 2},
    {"shard": 2},
    SQUARE,
    {"tensor": 2},
    {"shard": 2, "tensor": 2},
    {"pipeline": 2},
]
Saved = tuple[dict[str, Tensor], dict[str, Any], int]


def ranks_of(axes: dict[str, int]) -> int:
    count = 1
    for size in axes.values():
        count *= size
    return count


def named(axes: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in axes.items())


def identical(left: Any, right: Any) -> bool:
    """Whether two nested states are equal to the last bit."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(identical(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(identical, left, right))
    return bool(left == right)


# -------------------------------------------------------------------------- both ways


def _round_trip(axes: dict[str, int]) -> Any:
    def use(member: Member) -> Any:
        model, calls = member.task.model, count_calls(member)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator).double())
        given = {n: p.detach().clone() for n, p in model.named_parameters()}
        member.task.push()
        member.task.pull()
        unasked = list(calls)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert member.task.elsewhere is not None
        member.task.elsewhere.trained()  # type: ignore[attr-defined]
        member.task.pull()
        member.task.pull()
        back = {n: p.detach().clone() for n, p in model.named_parameters()}
        return identical(given, back), unasked, calls

    return led(use, "even", table(), axes)


@pytest.mark.parametrize("axes", MESHES, ids=named)
@pytest.mark.every(4)
def test_what_is_pushed_comes_back_bit_for_bit(ranks: Ranks, axes: dict[str, int]) -> None:
    exact, unasked, calls = ranks.run(ranks_of(axes), _round_trip, axes)[0]
    assert exact
    assert unasked == ["push"], "the host model was new: nothing had to be pulled"
    assert calls == ["push", "pull"], "the second pull costs nothing"


# -------------------------------------------------------------------------- checkpoints


def _save(axes: dict[str, int], name: str) -> Any:
    def use(member: Member) -> Saved:
        member.train(3)
        return member.parameters(), member.task.optimizer.state_dict(), member.task.step

    return led(use, name, table(), axes)


def _load(axes: dict[str, int], name: str, saved: Saved) -> Any:
    """Take up a state; return it as it is right after, and parameters two steps later."""

    def use(member: Member) -> Any:
        take_up(member, saved)
        again = (member.parameters(), member.task.optimizer.state_dict())
        member.train(2, first=9)
        return again, member.parameters()

    return led(use, name, table(), axes)


def take_up(member: Member, saved: Saved) -> None:
    parameters, optimizer, step = saved
    task = member.task
    task.model.load_state_dict(parameters, strict=False)
    task.optimizer.load_state_dict(optimizer)
    task.push()
    task.step = step
    assert task.scheduler is not None
    task.scheduler.load_state_dict({"step": step})


def plainly(name: str, saved: Saved) -> Any:
    member = by_itself(name, table())
    take_up(member, saved)
    again = (member.parameters(), member.task.optimizer.state_dict())
    member.train(2, first=9)
    return again, member.parameters()


@pytest.fixture(scope="module")
def saved(ranks: Ranks) -> Saved:
    """A state of a square of ranks."""
    found: Saved = ranks.run(4, _save, SQUARE, "even")[0]
    return found


@pytest.mark.parametrize("axes", [{"shard": 4}, {"replicate": 2}, {"shard": 2, "tensor": 2},
                                  {"pipeline": 2}, {}], ids=named)  # fmt: skip
@pytest.mark.every(3)
def test_any_mesh_goes_on_from_a_square(ranks: Ranks, saved: Saved, axes: dict[str, int]) -> None:
    again, later = ranks.run(ranks_of(axes), _load, axes, "even", saved)[0]
    assert identical(again[0], saved[0])
    assert identical(again[1], saved[1])
    same(later, plainly("even", saved)[1], within=1e-10)


def test_a_process_goes_on_from_a_square_mesh_and_back(ranks: Ranks, saved: Saved) -> None:
    again, _ = plainly("even", saved)
    assert identical(again[0], saved[0])
    assert identical(again[1]["state"], saved[1]["state"])
    member = by_itself("even", table())
    member.train(3)
    own = (member.parameters(), member.task.optimizer.state_dict(), member.task.step)
    taken, _ = ranks.run(4, _load, SQUARE, "even", own)[0]
    assert identical(taken[0], own[0])
    assert identical(taken[1]["state"], own[1]["state"])


def _another() -> str:
    """Offer the state of another model; then show that the ranks still serve."""

    def use(member: Member) -> str:
        state = by_itself("perceptron", table()).task.optimizer.state_dict()
        with pytest.raises(ValueError) as caught:
            member.task.optimizer.load_state_dict(state)
        member.train(1)
        return str(caught.value)

    return str(led(use, "odd", table(), {"shard": 2}))


def test_the_state_of_another_model_is_refused(ranks: Ranks) -> None:
    assert "parameter group" in ranks.run(2, _another)[0]


def test_parameters_are_not_added_to_what_an_island_trains(ranks: Ranks) -> None:
    assert "add them to the model" in ranks.run(1, _adding)[0]


def _adding() -> Any:
    def use(member: Member) -> str:
        with pytest.raises(ConfigError) as caught:
            member.task.optimizer.add_param_group({"params": []})
        return str(caught.value)

    return led(use, "odd", table(), {})


def test_an_empty_vector_needs_no_disk(tmp_path: Path) -> None:
    disk = HostModelOnDisk(tmp_path)
    assert disk.new(0).shape == (0,)
    disk.let_go()
    assert disk.nbytes == 0
