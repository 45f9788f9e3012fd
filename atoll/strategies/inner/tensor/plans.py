"""Tensor-parallel plans: how each module of a model is split. No communication."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from atoll.errors import ConfigError, unknown
from atoll.strategies.inner.options import InnerOptions

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "column": "a linear layer split by its outputs; takes whole features, gives a slice",
        "row": "a linear layer split by its inputs; takes a slice of features, gives whole ones",
        "gather": "as column, but its outputs are put together: whole features in and out",
        "slice": "as row, but each rank takes its slice of whole features; behind gather",
        "vocabulary": "an embedding or an output layer split by tokens; the loss goes with it",
        "inside": "whole parameters between a column and a row layer; gradients are summed",
        "cut": "as it is, but of its output each rank keeps a piece of the sequence",
        "sequence": "whole parameters that work on a piece of the sequence; gradients are summed",
        "join": "the same, and its output is put together to the whole sequence again",
        "replicate": "the same on all ranks",
    }
)
"""Word of a plan -> meaning; `cut`, `sequence` and `join` have no effect unless `sequence` is set
in `[island]`, `vocabulary` none unless `vocabulary` is."""

ALONG_THE_SEQUENCE = frozenset({"cut", "sequence", "join"})

WELL_KNOWN: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "column"),
        **dict.fromkeys(("o_proj", "down_proj"), "row"),
    }
)
"""Last part of a module's name -> word, as in most decoders of `transformers`."""

THEIRS: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "column",
        "rowwise": "row",
        "colwise_gather_output": "gather",
        "rowwise_split_input": "slice",
        "replicated_with_grad_allreduce": "inside",
        "replicate": "replicate",
    }
)
"""Word of a plan of `transformers` -> ours; theirs for an output layer means `vocabulary`."""

HEADS = ("heads", "kv_heads", "num_attention_heads", "num_key_value_heads")
"""Attributes of model configurations with a number of heads."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Words for the modules of one model, checked against it."""

    words: Mapping[str, str] = field(default_factory=dict)
    """Name of a module in the whole model -> word."""

    def __contains__(self, word: object) -> bool:
        """Return whether any module has the word."""
        return word in self.words.values()


def plan_of(model: nn.Module, options: InnerOptions) -> TensorPlan:
    """Return the plan of a model: the job file's, else the model's, else that of `transformers`.

    Raises:
        ConfigError: there is no plan, a pattern matches no module, or something cannot be divided;
            names the nearest valid value.
    """
    patterns = _patterns(model, options)
    words = _matched(patterns, model)
    for name, word in words.items():
        _refuse_unless_fitting(name, word, model.get_submodule(name))
    values = set(words.values())
    if "column" in values and "row" not in values:
        raise ConfigError(
            "the tensor plan splits features and never puts them together",
            given=", ".join(f"{pattern!r} = {word!r}" for pattern, word in patterns.items()),
            expected="a row layer behind every column layer",
        )
    if options.sequence and not values & ALONG_THE_SEQUENCE:
        raise ConfigError(
            "the tensor plan does not say what is split along the sequence",
            given=f"sequence = true, {type(model).__name__}",
            expected="a plan with the words cut and sequence",
            remedy="sequence = false in [island]",
        )
    _refuse_unless_divisible(words, model, options)
    return TensorPlan(words=words)


def splits(model: nn.Module, options: InnerOptions) -> Mapping[str, int]:
    """Return the dimension along which each split parameter is cut, by its name in the model.

    Other parameters are whole on every tensor rank. The model may be on the meta device. Raises as
    :func:`plan_of`.
    """
    if options.shape.tensor == 1:
        return {}
    found: dict[nn.Parameter, int] = {}
    for name, word in plan_of(model, options).words.items():
        for kind, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if word in {"column", "gather"} or (word == "vocabulary" and options.vocabulary):
                found[parameter] = 0
            elif word in {"row", "slice"} and kind == "weight":
                found[parameter] = 1
    return {name: found[p] for name, p in model.named_parameters() if p in found}


# ------------------------------------------------------------------------------------ sources


def _patterns(model: nn.Module, options: InnerOptions) -> Mapping[str, str]:
    if options.plan:
        return _flat(options.plan)
    own: Any = getattr(model, "tensor_plan", None)
    found = dict(own()) if callable(own) else {}
    found = found or _of_transformers(model) or _well_known(model)
    if not found and any(isinstance(part, nn.Conv2d) for part in model.modules()):
        shape = options.shape
        nearest = replace(shape, shard=shape.shard * shape.tensor, tensor=1)
        raise ConfigError(
            "convolutions are not split over tensor ranks: they are small, and what would be sent "
            "for them is not", given=f"{type(model).__name__}, tensor = {shape.tensor}",
            expected="a model with parameters in matrices, or a plan for those that are",
            remedy=f"the mesh {nearest} in [island]: parameters are cut along shard instead",
        )  # fmt: skip
    if not found:
        raise ConfigError(
            "there is no tensor plan for this model",
            given=type(model).__name__,
            expected="a plan: pattern of module names -> " + ", ".join(WORDS),
            remedy='plan = { fc1 = "column", fc2 = "row" } in [island], or another inner strategy;'
            f" its linear layers: {', '.join(_generic(_linear(model))) or 'none'}",
        )
    return found


def _flat(plan: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a plan of a job file with dotted names: in TOML `a.b = "row"` is a nested table."""
    found: dict[str, str] = {}
    for key, value in plan.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, str) or value not in WORDS:
            raise unknown("word of a tensor plan", str(value), WORDS)
        else:
            found[prefix + key] = value
    return found


def _of_transformers(model: nn.Module) -> dict[str, str]:
    library: Any = sys.modules.get("transformers")
    if library is None:
        return {}
    for name, inner in model.named_modules():
        if isinstance(inner, library.PreTrainedModel):
            return _translated(f"{name}." if name else "", inner)
    return {}


def _translated(prefix: str, inner: Any) -> dict[str, str]:
    """Return the plan of a `PreTrainedModel` in our words.

    Raises:
        ConfigError: it has parts that cannot be split here, e.g. experts.
    """
    body = getattr(inner, "base_model_prefix", "")
    inside = f"{body}." if body and hasattr(inner, body) and inner.base_model is not inner else ""
    theirs = {
        inside + pattern: word
        for pattern, word in (getattr(inner.config, "base_model_tp_plan", None) or {}).items()
    }
    if not theirs:
        return {}
    theirs |= dict(getattr(type(inner), "_tp_plan", None) or {})
    found: dict[str, str] = {}
    ends = _ends(inner)
    for pattern, word in theirs.items():
        if pattern not in ends and word not in THEIRS:
            raise ConfigError(
                "a part of this model cannot be split over tensor ranks",
                given=f"{prefix}{pattern}: {word!r} in the plan of {type(inner).__name__}",
                expected="one of " + ", ".join(THEIRS),
                remedy='inner = "fsdp", or a plan of your own in [island]',
            )
        if pattern in ends:  # both ends, because they may share one matrix
            found |= {prefix + name: "vocabulary" for name in ends}
        else:
            found[prefix + pattern] = THEIRS[word]
    return found


def _ends(inner: Any) -> set[str]:
    """Return the names of embedding and output layer of a `PreTrainedModel` with both."""
    first, last = inner.get_input_embeddings(), inner.get_output_embeddings()
    if last is None:
        return set()
    return {name for name, module in inner.named_modules() if module is first or module is last}


def _well_known(model: nn.Module) -> dict[str, str]:
    return {
        name: WELL_KNOWN[name.rpartition(".")[2]]
        for name in _linear(model)
        if name.rpartition(".")[2] in WELL_KNOWN
    }


def _linear(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


# --------------------------------------------------------------------------------- checks


def _matched(patterns: Mapping[str, str], model: nn.Module) -> dict[str, str]:
    """Return the word of each matching module; later patterns take precedence."""
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, str] = {}
    for pattern, word in patterns.items():
        if word not in WORDS:
            raise unknown("word of a tensor plan", word, WORDS)
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise _no_such_module(pattern, names)
        found |= dict.fromkeys(fitting, word)
    return found


def _no_such_module(pattern: str, names: list[str]) -> ConfigError:
    known = _generic(names)
    near = difflib.get_close_matches(pattern, [*known, *names], n=1, cutoff=0.5)
    return ConfigError(
        "the tensor plan names a module that the model does not have",
        given=repr(pattern),
        expected="one of " + ", ".join(known),
        remedy=f"did you mean {near[0]!r}?" if near else None,
    )


def _generic(names: Iterable[str]) -> list[str]:
    """Return unique names with `*` for numbers, so that all layers are one entry."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))


def _refuse_unless_fitting(name: str, word: str, module: nn.Module) -> None:
    """Raise ConfigError if a word does not apply to this type of module."""
    kinds: tuple[type, ...] = ()
    if word in {"column", "row", "gather", "slice"}:
        kinds = (nn.Linear,)
    elif word == "vocabulary":
        kinds = (nn.Linear, nn.Embedding)
    if kinds and not isinstance(module, kinds):
        raise ConfigError(
            f"the tensor plan cannot make {name!r} {word!r}",
            given=type(module).__name__,
            expected=" or ".join(kind.__name__ for kind in kinds),
            remedy="name the linear layers inside",
        )


def _refuse_unless_divisible(
    words: Mapping[str, str], model: nn.Module, options: InnerOptions
) -> None:
    ranks = options.shape.tensor
    # Heads are whole between gather and slice layers, e.g. in attention with norms over all heads.
    split = "column" in words.values() and "gather" not in words.values()
    sizes = _heads(model) if split else {}
    for name, word in words.items():
        module = cast(Any, model.get_submodule(name))
        if word in {"column", "gather"}:
            sizes[f"output features of {name}"] = module.out_features
        elif word in {"row", "slice"}:
            sizes[f"input features of {name}"] = module.in_features
        elif word == "vocabulary" and options.vocabulary:
            rows = getattr(module, "num_embeddings", None) or module.out_features
            sizes[f"tokens of {name}"] = rows
    for what, size in sizes.items():
        if size % ranks:
            raise _indivisible(what, size, sizes, ranks)


def _heads(model: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for name in HEADS:
            number = getattr(config, name, None)
            if isinstance(number, int) and number > 0:
                found[f"attention heads ({name})"] = number
    return found


def _indivisible(what: str, size: int, sizes: Mapping[str, int], ranks: int) -> ConfigError:
    common = math.gcd(*sizes.values())
    fitting = [count for count in range(1, common + 1) if common % count == 0]
    nearest = min(fitting, key=lambda count: (abs(count - ranks), count))
    without = " or vocabulary = false" if what.startswith("tokens") and nearest != ranks else ""
    return ConfigError(
        "the model cannot be shared evenly by the tensor ranks",
        given=f"{size} {what}, {ranks} tensor ranks",
        expected=f"a multiple of {ranks}",
        remedy=f"tensor = {nearest} in [island] mesh{without}",
    )
