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
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR

import atoll
from atoll.errors import ConfigError
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.strategies.wrapped_optimizer import KEY, needs_closure

pytest.importorskip("expecttest", reason="torch's own tests need it: pip install 'atoll[dev]'")
from torch.testing._internal import common_optimizers

for name in list(sys.modules):  # setuptools' copy of it warns when pip is looked for
    if name.partition(".")[0] == "distutils":
        del sys.modules[name]

# Loading torch's tests forbids everyone in this process to set torch.backends.
torch.backends.__allow_nonbracketed_mutation_flag = True

INFOS = {info.name: info for info in common_optimizers.optim_db}
METHODS = {"average": atoll.Average(every=2), "ddp": "ddp"}
"""One that combines parameters, and one that combines gradients."""
STEPS = 5
CPU = torch.device("cpu")


def dense(info: Any) -> bool:
    return not info.only_supports_sparse_grads


def by(name: str, info: Any) -> bool:
    """Return whether the method admits the optimizer."""
    return name == "average" or not needs_closure(info.optim_cls)


PAIRS = [
    pytest.param(
        info,
        method,
        id=f"{info.name}-{name}",
    )
    for info in INFOS.values()
    for name, method in METHODS.items()
    if by(name, info)
]
EVERY = [pytest.param(info, id=info.name) for info in INFOS.values()]
CLOSURELESS = [
    pytest.param(info, id=info.name) for info in INFOS.values() if not needs_closure(info.optim_cls)
]


class Net(nn.Module):
    """Takes (4, 5) and gives (4, 2); every parameter suits the optimizer."""

    def __init__(self, info: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = None
        if info.only_supports_sparse_grads:
            self.table = nn.Embedding(6, 2, sparse=True)
        else:
            bias = info.name != "Muon"  # it takes matrices only
            self.layers = nn.Sequential(
                nn.Linear(5, 3, bias=bias), nn.Tanh(), nn.Linear(3, 2, bias=bias)
            )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Any:
        if self.table is not None:
            return self.table((10 * x.abs()).long() % 6).sum(1)
        return self.layers(x)


def inputs() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(11)
    while True:
        yield torch.randn(4, 5, generator=generator)


def settings_of(info: Any) -> list[dict[str, Any]]:
    """Return torch's list of an optimizer's settings, with `foreach` and `fused` on and off."""
    given = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs(
        CPU, torch.float32, info, skip=("differentiable",)
    )
    # `capturable` needs an accelerator.
    return [each.kwargs for each in given if not each.kwargs.get("capturable")]


class Pair:
    """The same model twice: with the bare optimizer, and with the wrapped one."""

    def __init__(
        self,
        folder: Path,
        info: Any,
        method: Any = METHODS["average"],
        settings: dict[str, Any] | None = None,
    ) -> None:
        if needs_closure(info.optim_cls):
            method = METHODS["average"]
        self.rounds = method == "ddp" and not dense(info)
        """Sparse gradients are exchanged as dense ones: repeated rows are added in other orders."""
        self.plain, self.ours = Net(info), Net(info)
        kind = info.optim_cls
        given = {"lr": 0.01} if settings is None and info.name != "LBFGS" else settings or {}
        self.bare = kind(self.plain.parameters(), **copy.deepcopy(given))
        self.inner = kind(self.ours.parameters(), **copy.deepcopy(given))
        self.run = Run(SingleGroup(), Membership(folder))
        self.wrapped: Any = self.run.wrap(self.ours, self.inner, outer=method)

    @property
    def both(self) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
        return (self.plain, self.bare), (self.ours, self.wrapped)

    def train(self, steps: int = STEPS, after: Callable[[Any], object] = lambda _: None) -> None:
        for model, optimizer in self.both:
            train(model, optimizer, steps, after)

    def assert_same(self) -> None:
        for mine, theirs in zip(self.ours.parameters(), self.plain.parameters(), strict=True):
            if self.rounds:
                assert torch.allclose(mine, theirs, atol=1e-6)
            else:
                assert torch.equal(mine, theirs)
        if self.rounds:
            return
        ours, plain = self.inner.state_dict(), self.bare.state_dict()
        assert_equal(ours["param_groups"], plain["param_groups"])
        assert_equal(ours["state"], plain["state"])


def closure_of(model: nn.Module, optimizer: Any, x: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(x) - 0.5).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return closure


def train(
    model: nn.Module, optimizer: Any, steps: int, after: Callable[[Any], object] = lambda _: None
) -> list[float]:
    losses = []
    for _, x in zip(range(steps), inputs(), strict=False):
        closure = closure_of(model, optimizer, x)
        if needs_closure(getattr(optimizer, "inner", optimizer)):
            losses.append(float(optimizer.step(closure)))
        else:
            losses.append(float(closure()))
            optimizer.step()
        after(optimizer)
    return losses


def assert_equal(mine: Any, theirs: Any) -> None:
    """Compare nested states; tensors bit for bit."""
    if isinstance(theirs, Tensor):
        assert torch.equal(mine, theirs)
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for key in theirs:
            assert_equal(mine[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other)
    else:
        assert mine == theirs


@pytest.mark.parametrize(("info", "method"), PAIRS)
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
def test_zero_gradients_do_what_they_did(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    for model, optimizer in pair.both:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(*[lambda: torch.tensor(1.0)] * needs_closure(info.optim_cls))
    pair.assert_same()


@pytest.mark.parametrize(("info", "method"), PAIRS)
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


@pytest.mark.parametrize(("info", "method"), PAIRS)
def test_hooks_around_steps_run_once_and_in_order(info: Any, method: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info, method)
    called: list[tuple[str, Any]] = []
    handles = [
        pair.wrapped.register_step_pre_hook(lambda o, args, kwargs: called.append(("before", o))),
        pair.wrapped.register_step_post_hook(lambda o, args, kwargs: called.append(("after", o))),
        pair.inner.register_step_pre_hook(lambda o, args, kwargs: called.append(("in", o))),
        pair.inner.register_step_post_hook(lambda o, args, kwargs: called.append(("out", o))),
    ]
    train(pair.ours, pair.wrapped, 2)
    expected = [
        ("before", pair.wrapped), ("in", pair.inner), ("out", pair.inner), ("after", pair.wrapped)
    ]  # fmt: skip
    assert called == expected * 2
    for handle in handles:
        handle.remove()
    train(pair.ours, pair.wrapped, 1)
    assert called == expected * 2


@pytest.mark.parametrize("info", CLOSURELESS)
def test_a_hook_may_change_gradients_before_the_step(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    for _, optimizer in pair.both:
        optimizer.register_step_pre_hook(
            lambda o, args, kwargs: [
                p.grad.mul_(0.5) for g in o.param_groups for p in g["params"]
            ] and None
        )  # fmt: skip
    pair.train(3)
    pair.assert_same()


@pytest.mark.parametrize("info", EVERY)
def test_hooks_around_states(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    pair.train(1)
    wrapped, called = pair.wrapped, []
    handles = [
        wrapped.register_state_dict_pre_hook(lambda o: called.append(("saving", o))),
        wrapped.register_state_dict_post_hook(lambda o, state: {**state, "note": "x"}),
        wrapped.register_state_dict_post_hook(lambda o, state: called.append(("saved", o))),
        wrapped.register_load_state_dict_pre_hook(
            lambda o, state: {k: v for k, v in state.items() if k != "note"}
        ),
        wrapped.register_load_state_dict_pre_hook(
            lambda o, state: called.append(("loading", "note" in state))
        ),
        wrapped.register_load_state_dict_post_hook(lambda o: called.append(("loaded", o))),
    ]
    state = wrapped.state_dict()
    assert state["note"] == "x"
    assert KEY in state
    wrapped.load_state_dict(state)
    assert "note" in state, "what is given to load_state_dict stays as it was"
    assert called == [
        ("saving", wrapped), ("saved", wrapped), ("loading", False), ("loaded", wrapped)
    ]  # fmt: skip
    for handle in handles:
        handle.remove()
    assert "note" not in wrapped.state_dict()
    assert len(called) == 4


@pytest.mark.parametrize("info", EVERY)
def test_gradients_are_cleared_as_asked(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    pair.train(1)
    gradients = [p.grad for p in pair.ours.parameters()]
    assert all(gradient is not None for gradient in gradients)
    if dense(info):
        pair.wrapped.zero_grad(set_to_none=False)
        for parameter, gradient in zip(pair.ours.parameters(), gradients, strict=True):
            assert parameter.grad is gradient
            assert gradient is not None
            assert not gradient.any()
    pair.wrapped.zero_grad()
    assert all(p.grad is None for p in pair.ours.parameters())


@pytest.mark.parametrize("info", EVERY)
def test_it_looks_like_the_optimizer(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    assert isinstance(pair.wrapped, torch.optim.Optimizer)
    assert repr(pair.inner) in repr(pair.wrapped)
    assert pair.wrapped.defaults == pair.bare.defaults
    for name in (n for n in vars(pair.bare) if not n.startswith("_")):
        assert hasattr(pair.wrapped, name), name


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, pickle.dumps], ids=lambda w: w.__name__)
def test_copies_are_refused(way: Callable[[Any], Any], tmp_path: Path) -> None:
    pair = Pair(tmp_path, INFOS["Adam"])
    with pytest.raises(ConfigError, match="state_dict"):
        way(pair.wrapped)
    pair.train(1)
    copy.deepcopy(pair.wrapped.state_dict())
    copy.deepcopy(pair.inner)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    **{
        f"torch-{number}": each
        for number, each in enumerate(s for i in INFOS.values() for s in i.scheduler_inputs[0])
        if number < 2
    },
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.2, total_iters=3),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=9),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(
        o, 0.01, 0.05, 2, cycle_momentum="momentum" in o.defaults or "betas" in o.defaults
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2),
        ],
        optimizer=o,
    ),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
        ],
        milestones=[2],
    ),
    "swa": lambda o: SWALR(o, swa_lr=0.003, anneal_epochs=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("info", [INFOS["SGD"], INFOS["Adam"]], ids=["SGD", "Adam"])
def test_schedules_give_the_same_rates(info: Any, name: str, tmp_path: Path) -> None:
    settings = {"lr": 0.01} | ({"momentum": 0.9} if info.name == "SGD" else {})
    pair = Pair(tmp_path, info, METHODS["average"], settings)
    found = []
    for model, optimizer in pair.both:
        schedule: Any = SCHEDULES[name](optimizer)
        rates: list[list[float]] = []

        def move(o: Any, schedule: Any = schedule, rates: list[list[float]] = rates) -> None:
            plateau = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
            schedule.step(*[1.0] * plateau)
            rates.append([float(group["lr"]) for group in o.param_groups])

        train(model, optimizer, 7, move)
        found.append(rates)
    assert found[0] == found[1]
    pair.assert_same()


@pytest.mark.parametrize("info", EVERY)
def test_each_optimizer_follows_a_schedule(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    for model, optimizer in pair.both:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, 3, lambda _, schedule=schedule: schedule.step())  # type: ignore[misc]
    pair.assert_same()


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
