"""What is compared: methods with sensible codecs, most important first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EVERY = 24
"""Steps between two rounds (H), where nothing else is said."""
FRAGMENTS = 5
"""Of streaming methods: one layer and a fifth of the embedding each."""
WARM = {"shared_steps": 60, "outer_lr": 0.8, "outer_momentum": 0.75}
"""The warm start and the outer step of docs/measured/tuning.md, for 600 steps."""
SHARED = {"shared_steps": 60}
"""The warm start only, where the outer step is the method's own."""
ASYNC = {"every": EVERY, "dynamic": False}
"""Without measured speeds, so that a run repeats itself."""
OF_SIGNS = {"lr": 5e-4, "clip": 0.0}
"""For a method that moves every number by the rate: a third of AdamW's."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    """Unique; the codec after a slash where it is not the preset's."""
    preset: str
    codec: str = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the inner optimizer."""
    overlap_steps: int = 0
    """Steps that are computed while a round is under way."""
    members: tuple[int, ...] = (4, 8, 16)
    """Sizes of the group, the most telling first."""
    core: bool = False
    """Whether a shape needs it: such rows are run first, and with several seeds."""
    quick: bool = False
    """Whether it is part of the quick form."""


def _row(name: str, preset: str, codec: str = "fp32", **more: Any) -> Row:
    options = more.pop("options", {})
    return Row(name=name, preset=preset, codec=codec, options=options, **more)


def _diloco(name: str, codec: str = "fp32", *, every: int = EVERY, **more: Any) -> Row:
    options = WARM | {"every": every} | more.pop("options", {})
    return _row(name, "diloco", codec, options=options, **more)


def _streaming(name: str, codec: str = "fp32", **more: Any) -> Row:
    own = {"every": EVERY, "fragments": FRAGMENTS, "delay": 1, "mix": 0.0}
    options = SHARED | own | more.pop("options", {})
    overlap = options["delay"]
    return _row(name, "streaming-diloco", codec, options=options, overlap_steps=overlap, **more)


CORE: tuple[Row, ...] = (
    _row("alone", "alone", members=(1,), quick=True),
    _row("ddp", "ddp", quick=True),
    _diloco("diloco", quick=True),
    _diloco("diloco/int8", "feedback(int8)", quick=True),
    _streaming("streaming", quick=True),
    _streaming("streaming mix 0.5", options={"mix": 0.5}),
    _diloco("diloco/int4", "feedback(int4)"),
    _diloco("diloco/e3m0", "feedback(e3m0)"),
    _diloco("diloco h10", every=10),
    _diloco("diloco h50", every=50),
    _diloco("diloco h200", every=200),
    _diloco("diloco cold", options={"shared_steps": 0}),
    _diloco(
        "diloco averaged start",
        options={"shared_steps": 0, "warmup_steps": 60, "warmup_every": 4},
    ),
    _diloco("diloco drop30", options={"drop": 0.3}),
    _diloco("diloco h10 drop30", every=10, options={"drop": 0.3}),
    _row("async-diloco", "async-diloco", options=ASYNC),
    _row("async plain", "async-diloco", options=ASYNC | {"outer_optimizer": "nesterov"}),
    _row("d-psgd ring", "d-psgd", options={"graph": "ring"}, members=(8, 4, 16)),
    _row("d-psgd exponential", "d-psgd", options={"graph": "exponential"}, members=(8, 4, 16)),
)  # fmt: skip
"""What shapes are judged by; several seeds."""

FAMILY: tuple[Row, ...] = (
    _row("local-sgd", "local-sgd", options={"every": EVERY}, quick=True),
    _row("post-local-sgd", "post-local-sgd", options={"every": EVERY, "every_step_until": 60}),
    _row("fedavg", "fedavg", options={"every": EVERY}),
    _row("slowmo", "slowmo", options={"every": EVERY}),
    _row("open-diloco", "open-diloco", "fp16", options=WARM | {"every": EVERY}),
    _row("intellect-1", "intellect-1", "sigma8", options=WARM | {"every": EVERY}),
    _row(
        "muloco", "muloco", "feedback(int2)", options=WARM | {"every": EVERY},
        train={"optimizer": "muon"},
    ),
    _row(
        "muloco 8 members", "muloco", "feedback:0.9(int2)", train={"optimizer": "muon"},
        options=WARM | {"every": EVERY, "outer_lr": 0.9, "outer_momentum": 0.8}, members=(8,),
    ),
    _row(
        "muloco 16 members", "muloco", "feedback:0.9(int2)", train={"optimizer": "muon"},
        options=WARM | {"every": EVERY, "outer_lr": 1.0, "outer_momentum": 0.9}, members=(16,),
    ),
    _streaming("streaming/e3m0", "feedback(e3m0)"),
    _streaming("streaming delay 3", options={"delay": 3}),
    _row(
        "eager", "eager-diloco", options=SHARED | {"every": EVERY}, overlap_steps=EVERY, quick=True
    ),
    _row(
        "eager/e3m0", "eager-diloco", "feedback(e3m0)", options=SHARED | {"every": EVERY},
        overlap_steps=EVERY,
    ),
    _row(
        "sparseloco", "sparseloco", "feedback:0.95(topk:0.0625:4096|mean2)",
        options={"every": EVERY // 3},
    ),
    _row(
        "sparseloco 1/64", "sparseloco", "feedback:0.95(topk:0.015625:4096|mean2)",
        options={"every": EVERY // 3},
    ),
    _row(
        "decoupled", "decoupled-diloco",
        options=SHARED | {"every": EVERY, "fragments": 3, "grace": 0},
        overlap_steps=1,
    ),
    _row("async look-ahead", "async-look-ahead", options=ASYNC),
    _row("halos", "halos", options=ASYNC | {"merge_every": 4}),
    _row("des-loc", "des-loc", options={"every": EVERY}),
    _row(
        "mt-dao", "mt-dao", options={"every": EVERY, "slow_beta": 0.98, "slow_weight": 0.2},
    ),
    _diloco(
        "diloco torch:NAdam",
        options={
            "outer_optimizer": "torch:NAdam", "outer_lr": 0.05,
            "outer_options": "betas=(0.75, 0.999), eps=0.1",
        },
    ),
    _row("noloco", "noloco", options={"every": EVERY}),
    _diloco("diloco momentum", options={"outer_optimizer": "momentum"}),
    _diloco(
        "diloco sgd", options={"outer_optimizer": "sgd", "outer_momentum": 0.0, "outer_lr": 1.0}
    ),
    _diloco(
        "diloco adam", options={"outer_optimizer": "adam", "outer_momentum": 0.9, "outer_lr": 0.1}
    ),
    _diloco("diloco prune50", options={"prune": 0.5}),
)  # fmt: skip
"""Methods with rounds now and then."""

EVERY_STEP: tuple[Row, ...] = (
    _row("ddp/int8", "ddp", "feedback(int8)"),
    _row("ddp/topk", "ddp", "feedback(topk:0.01|int8)"),
    _row("ddp/randomk", "ddp", "feedback(randomk:0.05)"),
    _row("ddp/sign", "ddp", "feedback(sign)"),
    _row("ddp/ef21", "ddp", "ef21(topk:0.01)"),
    _row("powersgd", "powersgd"),
    _row("signsgd", "signsgd", ""),
    _row("one-bit-adam", "one-bit-adam", "", options={"warmup_steps": 120}),
    _row("demo", "demo", "", options={"topk": 128}, train=OF_SIGNS),
    _row("cocktail-sgd", "cocktail-sgd", "", overlap_steps=1),
    _row(
        "cocktail-sgd dense",
        "cocktail-sgd",
        "topk:0.5|int8",
        options={"probability": 0.4},
        overlap_steps=1,
    ),
    _row("sparta", "sparta", options={"probability": 0.05}, quick=True),
    _row("sparta h120", "sparta", options={"probability": 0.05, "every": 120}),
    _row("one-peer-exponential", "one-peer-exponential"),
    _row("push-sum", "push-sum"),
    _row("ad-psgd", "ad-psgd"),
    _row("parameter-server", "parameter-server"),
    _row("stale-synchronous", "stale-synchronous"),
    _row("async-sgd", "async-sgd"),
)
"""Methods that speak in every step."""

CODECS: tuple[Row, ...] = tuple(
    _diloco(f"diloco/{spec.partition(':')[0]}", f"feedback({spec})")
    for spec in ("fp8", "int2", "sign", "topk:0.05|int8", "randomk:0.1", "lowrank:4", "dct:32")
)
"""DiLoCo with the remaining codecs."""

ROWS = (
    *(dataclasses.replace(row, core=True) for row in CORE), *FAMILY, *EVERY_STEP, *CODECS,
)  # fmt: skip
"""All rows, in the order in which they are run."""


def named(names: str, rows: Sequence[Row] = ROWS) -> list[Row]:
    """Return the rows of these names, with commas between them; all where none is named.

    Raises:
        SystemExit: there is no such row.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {row.name for row in rows}
    for name in wanted:
        if name not in known:
            raise SystemExit(f"no row {name!r}; there are: {', '.join(sorted(known))}")
    return [row for row in rows if not wanted or row.name in wanted]
