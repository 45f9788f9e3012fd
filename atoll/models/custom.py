"""A user's model in the built-in trainer: `name = "module:factory"` in `[model]`.

The factory is a function or class in the job's code, or in a package of the nodes. Its arguments
are the other keys of `[model]`, and, where it has parameters of these names, values of the data:
`vocab_size` for text, `channels`, `classes` and `image` for images. It returns an `nn.Module` that
maps token ids (batch, length) to logits (batch, length, vocabulary), or images to logits
(batch, classes).

`criterion(outputs, targets)` and `loss(inputs, targets)` are optional: cross-entropy by default. A
pipeline also needs `units()`, or an `nn.Sequential`; tensor parallelism needs `tensor_plan()`; see
`contract.py`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from atoll.errors import ConfigError

EXPECTED = "module:factory, a function or class of the job's code that returns an nn.Module"


def is_custom(name: str) -> bool:
    """Return whether a model's name is `module:factory`."""
    return ":" in name


def build_custom(name: str, options: Mapping[str, Any], *, from_data: Mapping[str, Any]) -> Any:
    """Return a user's model, completed to a `Trainable` as far as possible.

    Args:
        name: `module:factory`.
        options: The other keys of `[model]`, for the factory.
        from_data: Further arguments for a factory that has parameters of these names.

    Raises:
        ConfigError: there is no such factory, it refuses the options, or returns something else.
    """
    factory = _factory(name)
    known = inspect.signature(factory).parameters
    fitting = {key: value for key, value in from_data.items() if key in known}
    try:
        inspect.signature(factory).bind(**{**fitting, **options})
    except TypeError as error:
        raise ConfigError(
            "the factory of this model does not take these options",
            given=f"name = {name!r} with {sorted({**fitting, **options})}: {error}",
            expected=f"{name.partition(':')[2]}{inspect.signature(factory)}",
            remedy="change the other keys of [model], or the factory's parameters",
        ) from error
    model = factory(**{**fitting, **options})
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "the factory of this model returned no model",
            given=f"{type(model).__name__} from {name}", expected="a torch.nn.Module",
        )  # fmt: skip
    return _completed(model, options=options)


def _factory(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the module of this model cannot be imported", given=f"name = {name!r}: {error}",
            expected=EXPECTED,
            remedy='set code = "FOLDER" in [job], the folder that holds it, or install it',
        ) from error  # fmt: skip
    if not callable(found):
        raise ConfigError(
            f"there is no {attribute!r} in {module}", given=f"name = {name!r}", expected=EXPECTED
        )
    return found  # type: ignore[no-any-return]


def _completed(model: Any, *, options: Mapping[str, Any]) -> Any:
    """Add what the trainer needs and the model lacks, as attributes of this instance.

    The model is not wrapped, so that its parameters keep their names in files.
    """
    if not callable(getattr(model, "criterion", None)):
        model.criterion = _cross_entropy
    if not callable(getattr(model, "loss", None)):
        model.loss = MethodType(_loss, model)
    config = getattr(model, "config", None)
    if getattr(config, "context", None) is None:
        context = getattr(model, "context", options.get("context"))
        if context is not None:
            if config is None:
                model.config = SimpleNamespace(context=int(context))
            else:
                config.context = int(context)
    return model


def check_context(model: nn.Module, *, name: str) -> None:
    """Raise ConfigError if it is unknown how many tokens a model of text takes."""
    if getattr(getattr(model, "config", None), "context", None) is None:
        raise ConfigError(
            "the length of this model's training sequences is unknown", given=f"name = {name!r}",
            expected="a number of tokens",
            remedy="set context in [model] (the factory gets it), or self.context in the model",
        )  # fmt: skip


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (..., classes), in nats."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model.criterion(model(inputs), targets)
    return loss
