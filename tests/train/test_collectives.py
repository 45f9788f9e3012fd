"""`run.all_reduce`, `run.broadcast`, `run.barrier`: before and after `wrap`, members lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.errors import ConfigError, GroupError, LeftBehind, PeerLost
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.run import Run
from atoll.run.place import Membership

T = TypeVar("T")


def each(groups: MemoryGroups, body: Callable[[Run], T], tmp_path: Path) -> list[T | BaseException]:
    """Run a script on every member."""

    def member(group: Group) -> T:
        slot, folder = int(group.me[1:]), tmp_path / group.me
        folder.mkdir(exist_ok=True)
        with Run(group, Membership(folder, seed=7, slot=slot, num_slots=len(groups))) as run:
            return body(run)

    return groups.run(member)


def all_of(groups: MemoryGroups, body: Callable[[Run], T], tmp_path: Path) -> list[T]:
    found: list[T] = []
    for one in each(groups, body, tmp_path):
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found


def small_model() -> nn.Linear:
    model, draws = nn.Linear(4, 2), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=draws)
    return model


def own(run: Run) -> Tensor:
    return torch.tensor([1.5, -2.0, 4.0]) * (run.slot + 1)


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("mean", [3.0, -4.0, 8.0]),
        ("sum", [9.0, -12.0, 24.0]),
        ("min", [1.5, -6.0, 4.0]),
        ("max", [4.5, -2.0, 12.0]),
    ],
)
def test_operations(tmp_path: Path, op: str, wanted: list[float]) -> None:
    found = all_of(MemoryGroups(3), lambda run: run.all_reduce(own(run), op), tmp_path)
    assert [one.tolist() for one in found] == [pytest.approx(wanted)] * 3
    assert all(torch.equal(one, found[0]) for one in found)


def test_integers_are_exact_and_types_stay(tmp_path: Path) -> None:
    large = 2**40

    def body(run: Run) -> list[Tensor]:
        count = torch.tensor([large + run.slot])
        half = torch.ones(2, 3, dtype=torch.bfloat16)
        (total,) = run.all_reduce([count], "sum")
        (same,) = run.all_reduce([half])
        return [total, same]

    for total, same in all_of(MemoryGroups(2), body, tmp_path):
        assert total.tolist() == [2 * large + 1]
        assert same.dtype == torch.bfloat16
        assert same.shape == (2, 3)
        assert bool((same == 1).all())


def test_several_tensors_travel_together(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[list[Tensor], int]:
        found = run.all_reduce([torch.full((2, 2), float(run.slot)), torch.ones(())])
        return found, run.group.committed_round

    for (first, second), rounds in all_of(MemoryGroups(2), body, tmp_path):
        assert first.tolist() == [[0.5, 0.5], [0.5, 0.5]]
        assert second.shape == ()
        assert rounds == 1


def test_broadcast_is_bit_for_bit(tmp_path: Path) -> None:
    odd = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45])

    def body(run: Run) -> tuple[list[Tensor], Tensor]:
        mine = odd if run.slot == 1 else torch.zeros(4)
        values = [mine, torch.tensor([run.slot])]
        return run.broadcast(values, "w1"), run.broadcast(torch.tensor([run.slot]))

    for (floats, number), first in all_of(MemoryGroups(3), body, tmp_path):
        assert torch.equal(floats.view(torch.int32), odd.view(torch.int32))
        assert number.tolist() == [1]
        assert first.tolist() == [0]  # of the first member


def test_barrier_waits_for_the_last(tmp_path: Path) -> None:
    arrived: list[int] = []

    def body(run: Run) -> int:
        arrived.append(run.slot)
        run.barrier()
        return len(arrived)

    assert all_of(MemoryGroups(3), body, tmp_path) == [3, 3, 3]


@pytest.mark.parametrize("phase", ["join", "send", "commit"])
def test_lost_member_is_left_out_on_all_others(tmp_path: Path, phase: str) -> None:
    groups = MemoryGroups(3)

    def body(run: Run) -> tuple[list[float], list[float]]:
        first = run.all_reduce(torch.ones(1), "sum").tolist()
        if run.slot == 2:
            groups.kill("w2", at=phase)
        second = run.all_reduce(torch.ones(1), "sum").tolist()
        return first, second

    one, two, lost = each(groups, body, tmp_path)
    assert isinstance(lost, PeerLost)
    assert one == two
    assert not isinstance(one, BaseException)
    assert one[0] == [3.0]
    # A member that is lost after its value has arrived may be in the result, then on all.
    assert one[1] in ([2.0], [3.0])


def test_broadcast_of_a_lost_member_fails_on_all_others(tmp_path: Path) -> None:
    groups = MemoryGroups(3)

    def body(run: Run) -> Tensor:
        run.barrier()
        if run.slot == 1:
            groups.kill("w1", at="send")
        return run.broadcast(torch.ones(1), "w1")

    found = each(groups, body, tmp_path)
    for index in (0, 2):
        assert isinstance(found[index], GroupError)
        assert "was lost" in str(found[index])


@pytest.mark.parametrize("outer", ["ddp", "diloco", "local-sgd", "streaming-diloco"])
def test_after_wrap_training_is_as_without_them(tmp_path: Path, outer: str) -> None:
    options = {
        "ddp": atoll.EveryStep(),
        "diloco": atoll.DiLoCo(every=4),
        "local-sgd": atoll.Average(every=4),
        "streaming-diloco": atoll.Streaming(every=4, fragments=2, delay=1),
    }

    def body(run: Run, *, exchange: bool) -> list[float]:
        # Of their own generators: members are threads of one process here.
        model, draws = small_model(), torch.Generator().manual_seed(run.slot)
        optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), 0.1), outer=options[outer])
        for step in range(8):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=draws)).square().mean().backward()
            optimizer.step()
            if exchange and step in (1, 3, 5):
                total = run.all_reduce(torch.tensor([float(run.slot), 1.0]), "sum")
                assert total.tolist() == pytest.approx([1.0, 2.0])
                if step == 5:
                    run.barrier()
        run.finish()
        return [float(x) for x in torch.cat([p.detach().flatten() for p in model.parameters()])]

    plain = all_of(MemoryGroups(2), lambda run: body(run, exchange=False), tmp_path)
    mixed = all_of(MemoryGroups(2), lambda run: body(run, exchange=True), tmp_path)
    assert mixed[0] == mixed[1]
    assert plain[0] == plain[1]
    if outer != "streaming-diloco":  # whose rounds a call ends early
        assert mixed == plain


def test_member_lost_after_wrap_is_left_out_and_training_goes_on(tmp_path: Path) -> None:
    groups = MemoryGroups(3)

    def body(run: Run) -> tuple[list[float], int, tuple[str, ...]]:
        model = small_model()
        optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), 0.1), outer="ddp")
        seen = [0.0]
        for step in range(6):
            if step == 3 and run.slot == 2:
                groups.kill("w2", at="join")
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            seen = run.all_reduce(torch.ones(1), "sum").tolist()
            optimizer.step()
        return seen, run.step, run.members

    one, two, lost = each(groups, body, tmp_path)
    assert isinstance(lost, PeerLost)
    assert one == two == ([2.0], 6, ("w0", "w1"))


def test_left_behind_member_gets_an_error(tmp_path: Path) -> None:
    groups = MemoryGroups(2)

    def body(run: Run) -> None:
        run.barrier()
        if run.slot == 1:
            groups.lose("w1")
            for _ in range(600):
                if groups.coordinator.machine.committed_round >= 2:
                    break
                threading.Event().wait(0.05)
        run.barrier()

    first, second = each(groups, body, tmp_path)
    assert first is None
    assert isinstance(second, LeftBehind | PeerLost)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda run: run.all_reduce(torch.ones(1), "product"), "unknown operation"),
        (lambda run: run.all_reduce(torch.ones(1, dtype=torch.int64)), "mean of integers"),
    ],
)
def test_wrong_calls_are_refused(tmp_path: Path, call: Callable[[Run], Tensor], what: str) -> None:
    (found,) = each(MemoryGroups(1), call, tmp_path)
    assert isinstance(found, ConfigError)
    assert what in str(found)


def test_members_with_other_shapes_get_an_error(tmp_path: Path) -> None:
    def body(run: Run) -> Tensor:
        return run.all_reduce(torch.ones(2 + run.slot), "max")

    for found in each(MemoryGroups(2), body, tmp_path):
        assert isinstance(found, GroupError)
        assert "shapes differ" in str(found)


@pytest.mark.parametrize("op", ["mean", "max"])
def test_no_tensors_are_exchanged_as_well(tmp_path: Path, op: str) -> None:
    assert all_of(MemoryGroups(2), lambda run: run.all_reduce([], op), tmp_path) == [[], []]


def test_methods_without_common_rounds_refuse(tmp_path: Path) -> None:
    def body(run: Run) -> Tensor:
        model = nn.Linear(2, 2)
        run.wrap(model, torch.optim.SGD(model.parameters(), 0.1), outer=atoll.NoSync(every=10))
        return run.all_reduce(torch.ones(1))

    for found in each(MemoryGroups(2), body, tmp_path):
        assert isinstance(found, ConfigError)
        assert "no rounds of all members" in str(found)


def test_alone_a_script_needs_no_others() -> None:
    with atoll.join() as run:
        assert run.all_reduce(torch.tensor([3.0]), "sum").tolist() == [3.0]
        assert run.all_reduce(torch.tensor([3, 4]), "max").tolist() == [3, 4]
        assert run.broadcast(torch.tensor([5])).tolist() == [5]
        run.barrier()
