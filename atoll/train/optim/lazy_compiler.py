"""Keep torch's compiler out of processes that compile nothing.

torch's optimizers mark their methods as not compiled, and import `torch._dynamo` to do so; so do
shape functions on the device `meta`. Until something imports the compiler, this module sets the
marks itself and wraps `step` without an import. When anything imports the compiler, e.g.
`torch.compile`, all of this is undone first.

The module relies on internals of torch. Its benefit (torch 2.13, after `import torch`, one AdamW
with one step):

    without this module  1.2 s of processor time, 81 MB
    with it              0.0 s of processor time, 10 MB

If torch looks different, the compiler is imported as usual at that cost, and
tests/train/optim/test_lazy_compiler.py fails.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

COMPILER = "torch._dynamo"

REGISTERED = "__dynamo_disable"
"""Attribute by which torch marks a function as registered with the compiler."""

REGISTRAR = "torch._compile"
"""Module of the wrapper that registers a function with the compiler on its first call."""

WRAPPED = "fn"
"""Variable by which wrappers of torch hold their function."""

STEPPING = ("torch.optim.optimizer", "_use_grad")
"""Module and name of the wrapper around `step`."""

SHAPES = ("torch._refs", "torch._refs.nn.functional", "torch._decomp.decompositions")
"""Modules of the functions that compute shapes."""

Undo = Callable[[], None]


def leave_out_compiler() -> None:
    """Let optimizers and meta-device models run without torch's compiler until it is imported.

    May be called again.
    """
    if COMPILER in sys.modules or any(isinstance(one, _Watch) for one in sys.meta_path):
        return
    undo: list[Undo] = []
    places = [vars(sys.modules[name]) for name in SHAPES if name in sys.modules]
    for place in (vars(Optimizer), *places):
        for function in place.values():
            _mark_registered(function, undo)
    for kind in vars(torch.optim).values():
        if inspect.isclass(kind) and issubclass(kind, Optimizer):
            for base in kind.__mro__:
                _step_without(base, undo)
    sys.meta_path.insert(0, _Watch(undo))


class _Watch:
    """Undoes all changes when the compiler is looked up, before it is loaded."""

    def __init__(self, undo: Sequence[Undo]) -> None:
        self._undo = undo

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing; see :class:`importlib.abc.MetaPathFinder`."""
        if name == COMPILER:
            undo, self._undo = self._undo, ()
            for take_back in undo:
                take_back()
        return None


def _mark_registered(function: Any, undo: list[Undo]) -> None:
    """Mark a function, below its wrappers, as already registered with the compiler."""
    while inspect.isfunction(function):
        plain = _below(function)
        registers = function.__globals__.get("__name__") == REGISTRAR
        if registers and inspect.isfunction(plain) and REGISTERED not in vars(plain):
            setattr(plain, REGISTERED, plain)
            undo.append(functools.partial(_forget, plain))
        function = plain


def _below(function: FunctionType) -> Any:
    """Return the function that a wrapper of torch calls; None if it is not a wrapper."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    try:
        return cells[WRAPPED].cell_contents
    except (KeyError, ValueError):  # ValueError: a name without a value yet
        return None


def _forget(plain: Callable[..., Any]) -> None:
    """Remove the mark from a function."""
    if vars(plain).get(REGISTERED) is plain:
        delattr(plain, REGISTERED)


def _step_without(kind: type, undo: list[Undo]) -> None:
    """Give an optimizer class a `step` without the compiler's part."""
    step = vars(kind).get("step")
    if not inspect.isfunction(step):
        return
    if (step.__globals__.get("__name__"), step.__code__.co_name) != STEPPING:
        return
    plain = getattr(step, "__wrapped__", None)
    if not inspect.isfunction(plain) or getattr(step, "hooked", False):
        return

    @functools.wraps(plain)
    def without(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:  # the caller kept this function since before the import
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            return plain(self, *args, **kwargs)

    def take_back() -> None:
        # Instances wrap it in their hooks: then it stays, and calls torch's own.
        if vars(kind).get("step") is without:
            put("step", step)

    put = functools.partial(setattr, kind)
    put("step", without)
    undo.append(take_back)
