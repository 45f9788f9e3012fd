"""Each method against its own single-process reference, before anything else is said about it.

Methods that tests/reference has are repeated on the language model, with what the codec makes of
every vector. All others are compared with the formula of their contract suite, in double precision
on its small network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from atoll.codec import Codec, make_codec
from atoll.data import BatchStream
from atoll.methods.table import PRESETS
from atoll.train.optim.optimizers import learning_rate
from bench.methods.running import Trial, shortened, train
from tests.contracts.collected import suites_of
from tests.contracts.strategy_suite import train_together
from tests.reference.algorithms import (
    Inner,
    Trajectory,
    Wire,
    data_parallel,
    diloco,
    local_sgd,
    one_node,
)

STEPS = 40
"""Of the comparison on the language model."""
SHORT = {"every": 5, "shared_steps": 10}
"""Intervals of the comparison, where a method has them, so that there are some rounds."""
PLAIN_CODECS = ("fp32", "fp16", "bf16", "int8", "int4", "int2", "e3m0")
"""Whose packets are one mean, and the same in every round."""
VARIANTS = {"drop", "prune", "growing", "every_step_until", "outer_optimizer", "warmup_steps"}
"""Options that tests/reference does not have."""
MEMBERS_OF_FORMULA = 3


def compare(trial: Trial) -> dict[str, Any]:
    """Return how far a method's run is from its reference: plain values."""
    known = trial.resolved().outer in REFERENCES and _is_plain(trial.resolved().codec)
    if known and not trial.row.train and not VARIANTS & _changed(trial):
        return _on_language_model(trial)
    return _with_formula(trial)


def _changed(trial: Trial) -> set[str]:
    """Return the options that are switched on."""
    return {name for name, value in trial.options().items() if value}


def _is_plain(codec: str) -> bool:
    inner = codec.removeprefix("feedback(").removesuffix(")")
    return inner.partition(":")[0] in PLAIN_CODECS


# --------------------------------------------------------------------- on the language model


def _on_language_model(trial: Trial) -> dict[str, Any]:
    named = PRESETS[trial.row.preset].options.keys() | trial.row.options.keys()
    options = dict(trial.row.options) | {k: v for k, v in SHORT.items() if k in named}
    row = dataclasses.replace(trial.row, options=options)
    trial = shortened(dataclasses.replace(trial, row=row), STEPS)
    name, reference = REFERENCES[trial.resolved().outer]
    trajectory = reference(trial)
    steps = _steps_of_rounds(trial, len(trajectory.rounds))
    found = train(trial, keep=frozenset(steps), evaluated=False)[0]
    distances = [
        float((found.kept[step] - expected).norm() / expected.norm())
        for step, expected in zip(steps, trajectory.rounds, strict=True)
    ]
    return {
        "against": f"tests/reference, {name}",
        "compared_steps": STEPS,
        "first_deviation": distances[0],
        "deviation": max(distances),
        "measure": "relative distance of the parameters after a round",
    }


def _steps_of_rounds(trial: Trial, rounds: int) -> list[int]:
    """Return after which step each round of a reference's trajectory was."""
    if rounds in (1, STEPS):
        return [STEPS] if rounds == 1 else list(range(1, STEPS + 1))
    options = trial.options()
    warm, every = int(options.get("shared_steps", 0)), int(options["every"])
    first = [warm] if warm else []
    return [*first, *range(warm + every, STEPS, every), STEPS]


def _streams(trial: Trial) -> list[Iterator[tuple[Tensor, Tensor]]]:
    """Return the members' batches: slot 0's during the shared start, the own ones after."""
    shards = trial.setting.shards(trial.seed, trial.members)
    batch, shared_steps = trial.setting.batch, trial.options().get("shared_steps", 0)

    def of(slot: int) -> Iterator[tuple[Tensor, Tensor]]:
        shared = BatchStream(shards, slot=0, batch=batch)
        for _ in range(shared_steps):
            yield next(shared)
        yield from shared if slot == 0 else BatchStream(shards, slot=slot, batch=batch)

    return [of(slot) for slot in range(trial.members)]


def _inner(trial: Trial) -> Inner:
    table = trial.setting.table(trial.row.train)
    return Inner(lr=learning_rate(table), clip=table.clip)


def _wire(trial: Trial, *, key: str, exact_start: bool) -> Wire:
    """Return what the codec makes of every vector; the end of a shared start is exact."""
    senders = [make_codec(trial.resolved().codec) for _ in range(trial.members)]
    started = [not exact_start] * trial.members
    back: Codec = senders[0].base

    def up(member: int, vector: Tensor) -> Tensor:
        if not started[member]:
            started[member] = True
            return vector
        sender = senders[member]
        decoded = sender.base.decode(sender.encode(vector.contiguous(), key=key))
        sender.finish(committed=True)
        return decoded

    def down(round_: int, vector: Tensor) -> Tensor:
        if exact_start and round_ == 0:
            return vector
        return back.decode(back.encode(vector, key="mean"))

    return Wire(up=up, down=down)


def _one_node(trial: Trial) -> Trajectory:
    model = trial.setting.model(trial.seed)
    return one_node(model, _streams(trial)[0], steps=STEPS, inner=_inner(trial))


def _data_parallel(trial: Trial) -> Trajectory:
    return data_parallel(
        trial.setting.model(trial.seed), _streams(trial), steps=STEPS, inner=_inner(trial),
        wire=_wire(trial, key="gradient", exact_start=False),
    )  # fmt: skip


def _local_sgd(trial: Trial) -> Trajectory:
    return local_sgd(
        trial.setting.model(trial.seed), _streams(trial), steps=STEPS, inner=_inner(trial),
        every=trial.options()["every"], wire=_wire(trial, key="delta", exact_start=False),
    )  # fmt: skip


def _diloco(trial: Trial) -> Trajectory:
    options = trial.options()
    warm = int(options.get("shared_steps", 0))
    return diloco(
        trial.setting.model(trial.seed), _streams(trial), steps=STEPS, inner=_inner(trial),
        every=options["every"], outer_lr=options["outer_lr"], momentum=options["outer_momentum"],
        warmup_steps=warm, warmup_every=max(1, warm),
        wire=_wire(trial, key="delta", exact_start=warm > 0),
    )  # fmt: skip


REFERENCES: dict[str, tuple[str, Callable[[Trial], Trajectory]]] = {
    "alone": ("one_node", _one_node),
    "every_step": ("data_parallel", _data_parallel),
    "average": ("local_sgd", _local_sgd),
    "diloco": ("diloco", _diloco),
}
"""Outer strategy -> its reference on the language model."""


# --------------------------------------------------------------------------- by its formula


def _with_formula(trial: Trial) -> dict[str, Any]:
    """Compare all contract suites of the outer strategy with their formulas."""
    suites = suites_of(type(trial.resolved().method))
    distances = []
    for suite in suites:
        runs = train_together(suite.options, members=MEMBERS_OF_FORMULA, steps=suite.steps)
        expected = suite().reference(MEMBERS_OF_FORMULA, suite.steps)
        distances.append(float((runs[0].vector().double() - expected).abs().max()))
    torch.set_num_threads(1)
    return {
        "against": f"formula of {', '.join(suite.__name__ for suite in suites)}",
        "compared_steps": max((suite.steps for suite in suites), default=0),
        "deviation": max(distances, default=None),
        "measure": "largest distance of a parameter",
    }
