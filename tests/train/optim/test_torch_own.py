"""What torch's own tests check of every optimizer, checked of the same optimizers wrapped.

The optimizers and their settings come from torch's tests (`optim_db`), the properties from its
`test_optim.py`. One member trains, so each property must hold as it does of the bare optimizer.

What cannot hold, and why:

- `differentiable=True` works on tensors that are not leaves of the graph, so on no module's
  parameters, bare or wrapped: torch's own tests leave it out of training, too.
- A copy (`copy.deepcopy`, `pickle`) is refused: it would be a second member of the same name. The
  state has to be copied instead.
- `repr` names the method, too.
- Where gradients are averaged, a parameter without a gradient takes part with zeros, so weight
  decay and momentum move it; a bare optimizer passes it over.
- Hooks for all optimizers (`register_optimizer_step_pre_hook`) see two: the wrapped one and the one
  around it. Hooks of one optimizer are called once per step.
- Optimizers that evaluate the model several times per step (LBFGS) work with methods that combine
  parameters only.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.strategies.wrapped_optimizer import KEY, needs_closure

pytest.importorskip("expecttest", reason="torch's own tests need it: pip install 'atoll[dev]'")
from tests.train.optim.torch_own import (
    CLOSURELESS,
    EVERY,
    INFOS,
    METHODS,
    PAIRS,
    STEPS,
    Net,
    Pair,
    assert_equal,
    closure_of,
    dense,
    inputs,
    settings_of,
    train,
)  # fmt: skip


@pytest.mark.parametrize(("info", "method"), PAIRS)
@pytest.mark.every(2)
def test_every_setting_gives_the_same_updates(info: Any, method: Any, tmp_path: Path) -> None:
    for settings in settings_of(info):
        pair = Pair(tmp_path, info, method, settings)
        pair.train(2 if info.step_requires_closure else STEPS)
        pair.assert_same()


@pytest.mark.parametrize("info", EVERY)
def test_steps_without_gradients_do_what_they_did(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info, METHODS["average"])
    for _, optimizer in pair.both:
        if needs_closure(info.optim_cls):
            optimizer.step(lambda: torch.tensor(1.0))
        else:
            optimizer.step()
    pair.assert_same()


@pytest.mark.parametrize("info", [pytest.param(i, id=n) for n, i in INFOS.items() if dense(i)])
@pytest.mark.every(2)
def test_zero_gradients_do_what_they_did(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    for model, optimizer in pair.both:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(*[lambda: torch.tensor(1.0)] * needs_closure(info.optim_cls))
    pair.assert_same()


@pytest.mark.parametrize(("info", "method"), PAIRS)
@pytest.mark.every(3)
def test_a_saved_state_goes_on_as_before(info: Any, method: Any, tmp_path: Path) -> None:
    for settings in settings_of(info):
        pair = Pair(tmp_path, info, method, settings)
        first = 1 if info.step_requires_closure else 2
        pair.train(first)
        # As a file would have it, read without trust.
        file = io.BytesIO()
        torch.save([pair.ours.state_dict(), pair.wrapped.state_dict()], file)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        pair.train(first)
        again = Pair(tmp_path, info, method, settings)
        again.ours.load_state_dict(weights)
        again.wrapped.load_state_dict(state)
        assert again.wrapped.task.step == first
        train(again.ours, again.wrapped, first)
        for mine, theirs in zip(again.ours.parameters(), pair.ours.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert_equal(again.inner.state_dict(), pair.inner.state_dict())


@pytest.mark.parametrize("info", EVERY)
@pytest.mark.every(2)
def test_states_of_the_bare_and_the_wrapped_fit_each_other(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    pair.train(2)
    state = pair.wrapped.state_dict()
    assert_equal({k: v for k, v in state.items() if k != KEY}, pair.bare.state_dict())
    pair.bare.load_state_dict(state)
    other = Pair(tmp_path, info)
    other.wrapped.load_state_dict(pair.bare.state_dict())
    assert_equal(other.inner.state_dict()["state"], pair.bare.state_dict()["state"])
    assert other.wrapped.param_groups is other.inner.param_groups
    assert other.wrapped.state is other.inner.state


@pytest.mark.parametrize("info", CLOSURELESS)
@pytest.mark.every(3)
def test_groups_have_their_own_settings(info: Any, tmp_path: Path) -> None:
    results: list[Any] = []
    for model in (Net(info), Net(info)):
        parameters = list(model.named_parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[:1], "lr": 0.003}]
        if parameters[1:]:
            groups.append({"params": parameters[1:]})
        optimizer = info.optim_cls(groups, lr=0.02)
        if results:
            run = Run(SingleGroup(), Membership(tmp_path))
            optimizer = run.wrap(model, optimizer, outer=METHODS["average"])
        train(model, optimizer, 3)
        assert optimizer.param_groups[0]["lr"] == 0.003
        results.append((list(model.parameters()), optimizer.state_dict()["param_groups"]))
    assert_equal(results[1], results[0])
    assert results[1][1][0]["param_names"] == [parameters[0][0]]


@pytest.mark.parametrize("info", CLOSURELESS)
@pytest.mark.every(3)
def test_added_parameters_are_trained_as_they_were(info: Any, tmp_path: Path) -> None:
    found = []
    for wrap in (False, True):
        model, more = Net(info), Net(info)
        optimizer = info.optim_cls(model.parameters(), lr=0.01)
        if wrap:
            run = Run(SingleGroup(), Membership(tmp_path))
            optimizer = run.wrap(model, optimizer, outer=METHODS["average"])
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.003})
        both = nn.ModuleList([model, more])
        train(nn.Sequential(more), optimizer, 2)
        found.append((list(both.parameters()), optimizer.state_dict()["param_groups"]))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize(("info", "method"), PAIRS)
@pytest.mark.every(3)
def test_a_closure_gives_its_loss(info: Any, method: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info, method)
    losses = []
    for model, optimizer in pair.both:
        stream = inputs()
        # Also where gradients are off, as torch's optimizers turn them on for the closure.
        with torch.no_grad():
            losses.append(
                [float(optimizer.step(closure_of(model, optimizer, next(stream)))) for _ in "abc"]
            )
    assert losses[0] == losses[1]
    pair.assert_same()


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, pickle.dumps], ids=lambda w: w.__name__)
def test_copies_are_refused(way: Callable[[Any], Any], tmp_path: Path) -> None:
    pair = Pair(tmp_path, INFOS["Adam"])
    with pytest.raises(ConfigError, match="state_dict"):
        way(pair.wrapped)
    pair.train(1)
    copy.deepcopy(pair.wrapped.state_dict())
    copy.deepcopy(pair.inner)


def test_a_rate_may_be_a_tensor_that_is_changed_in_place(tmp_path: Path) -> None:
    pair = Pair(tmp_path, INFOS["Adam"], settings={"lr": torch.tensor(0.01), "foreach": False})
    pair.train(4, after=lambda o: o.param_groups[0]["lr"].mul_(0.5))
    pair.assert_same()
    assert float(pair.wrapped.param_groups[0]["lr"]) == pytest.approx(0.01 / 16)


@pytest.mark.parametrize(
    "info",
    [
        pytest.param(info, id=name)
        for name, info in INFOS.items()
        if info.supports_complex and dense(info) and not needs_closure(info.optim_cls)
    ],
)
def test_complex_parameters_move_as_they_did(info: Any, tmp_path: Path) -> None:

    def moved(wrap: Callable[[nn.Module, Any], Any]) -> list[Tensor]:
        model = nn.Module()
        start = torch.tensor([1 + 2j, -0.5 + 0.1j])
        model.weight = nn.Parameter(start.clone())
        optimizer = wrap(model, info.optim_cls(model.parameters(), lr=0.01))
        found = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model.weight.abs().square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(model.weight.detach().clone())
        return found

    bare = moved(lambda model, optimizer: optimizer)
    for method in METHODS.values():
        run = Run(MemoryGroups(1)[0], Membership(tmp_path))
        assert_equal(
            moved(lambda model, optimizer, run=run, method=method: run.wrap(  # type: ignore[misc]
                model, optimizer, outer=method
            )), bare,
        )  # fmt: skip


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_default_type_changed_later_is_no_obstacle(method: Any, tmp_path: Path) -> None:
    """As torch's `test_set_default_dtype_works_with_foreach`."""
    pair = Pair(tmp_path, INFOS["Adam"], method, {"lr": 0.01, "foreach": True})
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for model, optimizer in pair.both:
            for x in [torch.ones(4, 5, dtype=torch.float32)] * 3:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    finally:
        torch.set_default_dtype(before)
    pair.assert_same()
