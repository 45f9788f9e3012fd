"""Any optimizer of `torch.optim` as the outer optimizer: `outer_optimizer = "torch:NAdam"`.

The mean pseudo-gradient is the gradient of one flat float32 parameter, on the CPU. Optimizers that
depend on the shapes of tensors therefore cannot be used (Muon), or see one vector (Adafactor does
not factor it); nor can those that call a closure (LBFGS) or need sparse gradients.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import AtollError, ConfigError, unknown

PREFIX = "torch:"
"""Of the names of outer optimizers from `torch.optim`."""


class OuterTorch:
    """An optimizer of `torch.optim` on one flat vector.

    Its state is created at the first step, or by `load_state_dict`.
    """

    is_plain = False

    def __init__(self, name: str, *, lr: float, options: str = "") -> None:
        """Try the optimizer on a vector of two numbers.

        Args:
            name: A class of `torch.optim`, e.g. `NAdam`.
            lr: Its learning rate.
            options: Its further arguments as in Python: `betas=(0.9, 0.99), eps=1e-3`.

        Raises:
            ConfigError: the class is unknown, refuses the arguments, or cannot take a step with a
                flat vector.
        """
        self._class = optimizer_class(name)
        self._arguments = {"lr": lr, **read_options(options)}
        given = f"outer_optimizer = '{PREFIX}{name}', lr = {lr}, outer_options = {options!r}"
        try:
            parameter, optimizer = self._make(torch.zeros(2))
            parameter.grad = torch.ones(2)
            optimizer.step()
            _tensors(optimizer.state[parameter])
        except AtollError:
            raise
        except Exception as error:  # each optimizer has errors of its own
            raise ConfigError(
                f"torch.optim.{name} cannot be the outer optimizer: {error}", given=given,
                expected="arguments that it accepts, and steps with a flat vector",
                remedy="compare outer_options with the arguments of this class of torch.optim",
            ) from error  # fmt: skip
        self._loaded: dict[str, Tensor] = {}
        self._parameter: nn.Parameter | None = None

    def _make(self, theta: Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(theta)
        return parameter, self._class([parameter], **self._arguments)

    def step(self, theta: Tensor, g: Tensor) -> None:
        """Update `theta` in place with the pseudo-gradient `g`, which is overwritten."""
        if self._parameter is None:
            self._parameter, self._optimizer = self._make(theta)
            if self._loaded:
                self._optimizer.state[self._parameter] = dict(self._loaded)
                self._loaded = {}
        self._parameter.data = theta  # the common state may be another tensor than last time
        self._parameter.grad = g
        self._optimizer.step()
        self._parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of torch's optimizer for its one parameter."""
        if self._parameter is None:
            return dict(self._loaded)
        return _tensors(self._optimizer.state[self._parameter])

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        self._loaded = {name: value.clone() for name, value in state.items()}
        self._parameter = None


def optimizer_class(name: str) -> Any:
    """Return a class of `torch.optim`; raises ConfigError, naming the nearest."""
    known = {
        each: value
        for each, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    if name not in known:
        raise unknown("optimizer of torch.optim", name, known)
    return known[name]


def read_options(text: str) -> dict[str, Any]:
    """Return keyword arguments from text as in a Python call, literals only.

    Raises:
        ConfigError: it is something else, or sets the rate.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) != "f":
            raise ValueError("not a list of keyword arguments")
        if any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("no ** here")
        found = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(
            "outer_options cannot be read", given=repr(text),
            expected="arguments of the optimizer, e.g. 'betas=(0.9, 0.99), eps=1e-3'",
        ) from error  # fmt: skip
    if "lr" in found:
        raise ConfigError(
            "outer_options contains the learning rate", given=repr(text), expected="no lr",
            remedy=f"outer_lr = {found['lr']}",
        )  # fmt: skip
    return found


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return an optimizer's state, which has to be tensors to be in checkpoints."""
    other = sorted(k for k, v in state.items() if v is not None and not isinstance(v, Tensor))
    if other:
        raise ValueError(f"its state is not made of tensors: {', '.join(other)}")
    return {name: value for name, value in state.items() if value is not None}
