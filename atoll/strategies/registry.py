"""Names of strategies and presets: rows of data. Importing this loads no torch."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from atoll.config import StrategyTable, read_table
from atoll.errors import ConfigError, unknown
from atoll.group.policy import GroupPolicy

if TYPE_CHECKING:
    from atoll.strategies.base import Outer

INNERS: Mapping[str, str] = MappingProxyType(
    {
        "local": "atoll.strategies.inner.local:Local",
        **dict.fromkeys(
            ("ddp", "fsdp", "tensor", "pipeline", "hybrid"),
            "atoll.strategies.inner.leader:IslandLeader",
        ),
    }
)
"""Name -> class that computes a step."""

OUTERS: Mapping[str, str] = MappingProxyType(
    {
        "alone": "atoll.strategies.outer.single:NoSync",
        "every_step": "atoll.strategies.outer.every_step:EveryStep",
        "average": "atoll.strategies.outer.average:Average",
        "diloco": "atoll.strategies.outer.diloco:DiLoCo",
        "streaming": "atoll.strategies.outer.streaming:Streaming",
        "eager": "atoll.strategies.outer.eager:Eager",
        "slowmo": "atoll.strategies.outer.slowmo:SlowMo",
        "asynchronous": "atoll.strategies.parameter_server.asynchronous:Asynchronous",
        "server": "atoll.strategies.parameter_server.server:Server",
        "gossip": "atoll.strategies.outer.gossip:Gossip",
        "noloco": "atoll.strategies.outer.noloco:NoLoCo",
        "pairwise": "atoll.strategies.outer.pairwise:Pairwise",
        "sparta": "atoll.strategies.outer.sparta:Sparta",
        "sign_majority": "atoll.strategies.outer.sign_majority:SignMajority",
        "powersgd": "atoll.strategies.outer.powersgd:PowerSGD",
        "demo": "atoll.strategies.outer.demo:DeMo",
        "onebit_adam": "atoll.strategies.outer.onebit_adam:OneBitAdam",
        "cocktail": "atoll.strategies.outer.cocktail:Cocktail",
    }
)
"""Name -> the options of an outer strategy; their `build` makes it."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A well-known method as the names of its parts."""

    outer: str
    codec: str = "fp32"
    inner: str = "local"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the outer strategy that differ from its defaults."""


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "alone": Preset(outer="alone"),
        "ddp": Preset(outer="every_step"),
        "local-sgd": Preset(outer="average"),
        "post-local-sgd": Preset(outer="average", options={"every_step_until": 500}),
        "fedavg": Preset(
            outer="diloco", options={"every": 100, "outer_optimizer": "sgd", "outer_lr": 1.0}
        ),
        "open-diloco": Preset(outer="diloco", codec="fp16"),
        "intellect-1": Preset(outer="diloco", codec="sigma8", options={"every": 100}),
        "muloco": Preset(outer="diloco", codec="feedback(int2)", options={"every": 30}),
        "streaming-diloco": Preset(outer="streaming", codec="feedback(e3m0)"),
        "eager-diloco": Preset(outer="eager", codec="feedback(e3m0)"),
        "slowmo": Preset(outer="slowmo"),
        "async-diloco": Preset(outer="asynchronous", codec="feedback(int8)"),
        "parameter-server": Preset(outer="server"),
        "stale-synchronous": Preset(outer="server", options={"mode": "stale", "bound": 3}),
        "async-sgd": Preset(
            outer="server", options={"mode": "asynchronous", "staleness": "inverse"}
        ),
        "d-psgd": Preset(outer="gossip"),
        "one-peer-exponential": Preset(outer="gossip", options={"graph": "one-peer"}),
        "push-sum": Preset(outer="gossip", options={"graph": "random", "push_sum": True}),
        "noloco": Preset(outer="noloco"),
        "ad-psgd": Preset(outer="pairwise"),
        "sparta": Preset(outer="sparta"),
        "signsgd": Preset(outer="sign_majority", codec="sign", options={"momentum": 0.9}),
        "powersgd": Preset(outer="powersgd"),
        "demo": Preset(outer="demo", codec="bf16"),
        "cocktail-sgd": Preset(outer="cocktail", codec="topk:0.2|int4"),
        "one-bit-adam": Preset(outer="onebit_adam", codec="sign", options={"warmup_steps": 1000}),
        # Measured on a small model and 2,000 steps (docs/measured/tuning.md): as good as data
        # parallel with 219 times fewer bytes. Larger models need a longer interval.
        "diloco": Preset(
            outer="diloco",
            codec="feedback(int8)",
            options={
                "every": 35,
                "shared_steps": 170,
                "outer_lr": 0.8,
                "outer_momentum": 0.75,
            },
        ),
    }
)
"""Name in a job file -> inner x outer x codec."""


FIRST_STEPS: Mapping[str, int] = MappingProxyType(
    {"shared_steps": 10, "every_step_until": 2, "warmup_steps": 5}
)
"""Options that count first steps -> which part of a run a preset's may be: a tenth, a half."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A strategy with nothing left open."""

    inner: str
    outer: str
    codec: str
    options: Mapping[str, Any]
    policy: GroupPolicy = field(default_factory=GroupPolicy)
    """What the group does with the members' values."""

    def names(self) -> dict[str, str]:
        """Return the three names, and the words of an unusual policy, for summaries."""
        plain, words = GroupPolicy(), dataclasses.asdict(self.policy)
        unusual = {name: word for name, word in words.items() if word != getattr(plain, name)}
        return {"inner": self.inner, "outer": self.outer, "codec": self.codec} | unusual


def resolve(table: StrategyTable, *, steps: int | None = None) -> Resolved:
    """Return the parts that `[strategy]` means; the codec's name is checked when it is made.

    What the table leaves out comes from its preset; options of the preset hold only for the
    preset's own outer strategy.

    Args:
        table: What a person wrote.
        steps: Of the run; a preset's first steps are at most a part of them (`FIRST_STEPS`).

    Raises:
        ConfigError: a preset, inner or outer strategy is unknown; the nearest one is named.
    """
    if table.preset not in PRESETS:
        raise unknown("preset of strategies", table.preset, PRESETS)
    preset = PRESETS[table.preset]
    outer, inner = table.outer or preset.outer, table.inner or preset.inner
    if outer not in OUTERS:
        raise unknown("outer strategy", outer, OUTERS)
    if inner not in INNERS:
        raise unknown("inner strategy", inner, INNERS)
    options = dict(preset.options if outer == preset.outer else {})
    for name, share in FIRST_STEPS.items():
        if steps is not None and name in options:
            options[name] = min(options[name], steps // share)
    options |= dict(table.options)
    policy = GroupPolicy(
        aggregate=table.aggregate, collective=table.collective, admission=table.admission
    )
    return Resolved(
        inner=inner, outer=outer, codec=table.codec or preset.codec, options=options, policy=policy
    )


def load(path: str) -> Any:
    """Return the object that `module:Name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def read_options(resolved: Resolved) -> Any:
    """Return the options of the outer strategy as its dataclass; loads torch.

    Raises:
        ConfigError: an option is unknown or of the wrong type.
    """
    where, kind = f"[strategy] with outer = {resolved.outer!r}", load(OUTERS[resolved.outer])
    own = {field.name for field in dataclasses.fields(kind)}
    words = {field.name for field in dataclasses.fields(StrategyTable)} - {"options"}
    for name in resolved.options:
        if name not in own:  # it may as well be a word of the table itself that is misspelt
            raise unknown(f"key in {where}", name, own | words)
    return read_table(kind, resolved.options, where=where)


def build_outer(resolved: Resolved) -> Outer:
    """Return the outer strategy; loads torch.

    Raises:
        ConfigError: an option is unknown, of the wrong type or out of range.
    """
    outer: Outer = read_options(resolved).build()
    return outer


def resolve_outer(outer: object, *, codec: str = "") -> tuple[Any, str]:
    """Return options and codec for what a person wrote in `run.wrap`: a name or options.

    Args:
        outer: The name of a preset or an outer strategy, or an options object like `DiLoCo()`.
        codec: The codec; empty for the preset's, or fp32.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(outer, str):
        if outer in PRESETS:
            resolved = resolve(StrategyTable(preset=outer, codec=codec))
        elif outer in OUTERS:
            resolved = Resolved(inner="local", outer=outer, codec=codec or "fp32", options={})
        else:
            raise unknown("outer strategy", outer, {*PRESETS, *OUTERS})
        return read_options(resolved), resolved.codec
    if dataclasses.is_dataclass(outer) and hasattr(outer, "build"):
        return outer, codec or "fp32"
    raise ConfigError(
        "outer is neither a name nor options of a strategy",
        given=repr(outer),
        expected='"diloco" or atoll.DiLoCo(every=500)',
    )


def without_shared_steps(options: Any, codec: str) -> tuple[Any, str]:
    """Return options that count no first steps on the same data, and the codec as it is.

    Only who deals the data can give everybody the same; beside `run.wrap` that is the script.
    """
    if getattr(options, "shared_steps", 0):
        options = dataclasses.replace(options, shared_steps=0)
    return options, codec
