"""The optimizers of torch's own tests, and each of them twice: bare, and wrapped by Atoll."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.strategies.wrapped_optimizer import needs_closure

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
    inputs = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs(
        CPU, torch.float32, info, skip=("differentiable",)
    )
    # `capturable` needs an accelerator.
    return [each.kwargs for each in inputs if not each.kwargs.get("capturable")]


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
        options = {"lr": 0.01} if settings is None and info.name != "LBFGS" else settings or {}
        self.bare = kind(self.plain.parameters(), **copy.deepcopy(options))
        self.inner = kind(self.ours.parameters(), **copy.deepcopy(options))
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
