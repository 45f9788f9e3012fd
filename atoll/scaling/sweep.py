"""The runs of a sweep: sizes x tokens x members x rounds, as job files.

    [sweep]
    tokens = [200_000, 400_000, 800_000]   # of all members together
    members = [1, 2, 4]
    every = [10, 40]                       # optimizer steps between two rounds
    batch = 32                             # sequences per step of all members together
    [[sweep.sizes]]
    layers = 2                             # keys of [model], and `lr`
    width = 32
    lr = 8e-3

All other tables are those of a job file, and common to all runs. Every run has the same tokens per
step whatever its members, as in Charles et al. 2025 (https://arxiv.org/abs/2503.09799), so that M
does not change the number of optimizer steps.
"""

from __future__ import annotations

import hashlib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.config import JobSpec, dump_spec, read_spec
from atoll.errors import ConfigError, unknown

KEYS = ("name", "tokens", "members", "every", "batch", "lr", "outer_lr", "seeds", "sizes")

WARM_UP_SHARE = 10
"""The warm-up is at most this part (1/n) of a run: short runs would never reach their peak rate."""

MAX_RUNS = 2000

DEFAULT_CONTEXT = 64


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep."""

    key: str
    """Name, with a digest of the job: other settings have another key."""
    spec: JobSpec
    tokens: int
    """All members together; the nearest whole number of steps."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All runs of a sweep."""

    name: str
    runs: tuple[SweepRun, ...]

    @property
    def most_members(self) -> int:
        """Members of the largest run."""
        return max(run.spec.job.nodes for run in self.runs)

    @property
    def tokens(self) -> int:
        """Tokens of all runs."""
        return sum(run.tokens for run in self.runs)


def read_sweep(path: Path) -> Sweep:
    """Return the runs of a sweep file.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("a sweep cannot be read", given=f"{path} ({error})") from error
    return make_sweep(tables, name=path.stem)


def make_sweep(tables: Mapping[str, Any], *, name: str) -> Sweep:
    """Return the runs of the tables of a sweep file.

    Raises:
        ConfigError: a key or value is wrong.
    """
    common = {key: value for key, value in tables.items() if key != "sweep"}
    wanted = tables.get("sweep")
    if not isinstance(wanted, dict):
        raise ConfigError(
            "this file is no sweep", given=", ".join(tables) or "nothing",
            expected="a table [sweep] with tokens and [[sweep.sizes]]",
            remedy="see examples/scaling_sweep.toml",
        )  # fmt: skip
    for key, value in common.items():
        if not isinstance(value, dict):
            raise ConfigError(
                "a key of a sweep is in no table", given=f"{key} = {value!r}",
                expected="the tables of a job file, and [sweep]",
            )  # fmt: skip
    for key in wanted:
        if key not in KEYS:
            raise unknown("key in [sweep]", key, KEYS)
    sizes = wanted.get("sizes")
    if not isinstance(sizes, list) or not sizes or not all(isinstance(s, dict) for s in sizes):
        raise ConfigError(
            "a sweep needs at least one size", given=repr(sizes),
            expected="[[sweep.sizes]] once per size, with keys of [model]",
        )  # fmt: skip
    seed = common.get("job", {}).get("seed", 7)
    axes = {
        "tokens": _list(wanted, "tokens", least=1),
        "members": _list(wanted, "members", least=1, default=[1]),
        "every": _list(wanted, "every", least=1, default=[None]),
        "lr": _list(wanted, "lr", least=0, default=[None], whole=False),
        "outer_lr": _list(wanted, "outer_lr", least=0, default=[None], whole=False),
        "batch": _list(wanted, "batch", least=1, default=[None]),
        "seed": _list(wanted, "seeds", least=0, default=[seed]),
    }
    name = str(wanted.get("name", name))
    runs: dict[str, SweepRun] = {}
    combinations = itertools.product(enumerate(sizes, start=1), *axes.values())
    for (number, size), *values in combinations:
        if len(runs) == MAX_RUNS:
            raise ConfigError("a sweep has too many runs", expected=f"at most {MAX_RUNS}")
        chosen = dict(zip(axes, values, strict=True))
        run = _run(common, name, number, size, chosen)
        runs[run.key] = run
    return Sweep(name=name, runs=tuple(runs.values()))


def _list(
    table: Mapping[str, Any],
    key: str,
    *,
    least: float,
    default: Sequence[Any] = (),
    whole: bool = True,
) -> Sequence[Any]:
    """Return the values of an axis; a single value is a list of one."""
    value = table.get(key, default)
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    kinds = (int,) if whole else (int, float)
    fits = [v is None or (isinstance(v, kinds) and not isinstance(v, bool)) for v in values]
    if not values or not all(fits) or any(v is not None and v < least for v in values):
        raise ConfigError(
            f"{key} in [sweep] cannot be used", given=repr(value),
            expected=f"a list of {'whole ' * whole}numbers of at least {least}",
            remedy=f"e.g. {key} = [1, 2, 4]",
        )  # fmt: skip
    return values


def _run(
    common: Mapping[str, Any],
    name: str,
    number: int,
    size: Mapping[str, Any],
    chosen: Mapping[str, Any],
) -> SweepRun:
    """Return one run."""
    tables = {key: dict(value) for key, value in common.items()}
    for table in ("job", "model", "train", "strategy"):
        tables.setdefault(table, {})
    job, model, train, strategy = (tables[key] for key in ("job", "model", "train", "strategy"))
    model |= {key: value for key, value in size.items() if key != "lr"}
    members, every, batch = chosen["members"], chosen["every"], chosen["batch"]
    if batch is not None:
        if batch % members:
            raise ConfigError(
                "the batch of a sweep cannot be shared by its members",
                given=f"batch = {batch}, members = {members}",
                expected="batch in [sweep], of all members together, to be a multiple of members",
            )
        train["batch"] = batch // members
    rate = chosen["lr"] if chosen["lr"] is not None else size.get("lr")
    train |= {"lr": rate} if rate is not None else {}
    strategy |= {"every": every} if every is not None else {}
    strategy |= {"outer_lr": chosen["outer_lr"]} if chosen["outer_lr"] is not None else {}
    context = int(model.get("context", DEFAULT_CONTEXT))
    per_step = members * int(train.get("batch", 16)) * context
    steps = round(chosen["tokens"] / per_step)
    least = max(1, every or 1)
    if steps < least:
        raise ConfigError(
            "a run of the sweep is shorter than a round",
            given=f"{chosen['tokens']} tokens, {per_step} per step: {steps} steps",
            expected=f"at least {least} steps (every = {every or 1})",
            remedy=f"at least {least * per_step} tokens, or a smaller batch",
        )
    warmup = int(train.get("warmup", 50))
    train |= {"steps": steps, "warmup": min(warmup, steps // WARM_UP_SHARE)}
    train.setdefault("pace", "equal")  # a slower machine would else train on fewer tokens
    job |= {"nodes": members, "seed": chosen["seed"]}
    words = [name, f"s{number}", f"d{steps * per_step}", f"m{members}"]
    words += [f"h{every}"] if every is not None else []
    job["name"] = "-".join(words)[:40].rstrip("-.")
    spec = read_spec(tables)
    digest = hashlib.sha256(dump_spec(spec).encode()).hexdigest()[:8]
    return SweepRun(key=f"{'-'.join(words)}-{digest}", spec=spec, tokens=steps * per_step)
