"""Plans of memory: formulas that must hold, jobs that are refused, changes that make a job fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.cli.main import main
from atoll.config import JobSpec, dump_spec
from atoll.errors import ConfigError
from atoll.plan.memory import PROGRAM_BYTES, plan_memory
from atoll.plan.remedies import nearest_change
from tests.plan.jobs import job

LARGE = "layers = 12\nwidth = 768\nheads = 12\ncontext = 64\nvocab_size = 50304"
"""The sizes of GPT-2's smallest, over half a gigabyte of weights."""


def on_cuda(spec: JobSpec) -> JobSpec:
    return replace(spec, job=replace(spec.job, device="cuda"))


def test_a_single_process_computes_on_the_device_it_asks_for(tmp_path: Path) -> None:
    plan = plan_memory(on_cuda(job(tmp_path)))
    (only,) = plan.ranks
    assert plan.device_bytes(only) == only.static + only.passing == plan.worst_bytes
    assert plan.main_bytes(only) < plan_memory(job(tmp_path)).main_bytes(only)


def test_sharding_divides_sixteen_bytes_per_parameter(tmp_path: Path) -> None:
    whole = plan_memory(job(tmp_path, strategy='inner = "ddp"', island="ranks = 2"))
    shards = plan_memory(job(tmp_path, strategy='inner = "fsdp"', island="ranks = 4"))
    counted = 16 * whole.elements
    rank = whole.ranks[0]
    assert rank.static - rank.buffers == pytest.approx(counted, rel=0.01)
    for rank in shards.ranks:
        assert rank.static - rank.buffers == pytest.approx(counted / 4, rel=0.01)


def test_a_large_model_takes_no_memory(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    plan = plan_memory(job(tmp_path, sizes=LARGE, strategy='inner = "fsdp"', island="ranks = 8"))
    assert plan.elements > 120_000_000
    assert plan.model_bytes == pytest.approx(4 * plan.elements, rel=0.01)
    assert plan.ranks[0].host_model == plan.model_bytes
    assert all(rank.host_model == rank.outer == 0 for rank in plan.ranks[1:])
    assert torch.equal(torch.get_rng_state(), before)


def test_without_resharding_all_weights_stay_gathered(tmp_path: Path) -> None:
    strategy, island = 'inner = "fsdp"', "ranks = 2\n"
    with_it = plan_memory(job(tmp_path, strategy=strategy, island=island)).ranks[0]
    without = plan_memory(job(tmp_path, strategy=strategy, island=island + "reshard = false"))
    block, norm = 4 * (12 * 16 * 16 + 2 * 16), 4 * 16
    assert without.ranks[0].gathered - with_it.gathered == block + norm


def test_accelerators_and_main_memory_are_counted_apart(tmp_path: Path) -> None:
    strategy, island = 'inner = "fsdp"', "ranks = 2\n"
    plan = plan_memory(on_cuda(job(tmp_path, strategy=strategy, island=island)))
    first, second = plan.ranks
    assert plan.device_bytes(first) == first.static + first.passing == plan.worst_bytes
    assert plan.main_bytes(second) == PROGRAM_BYTES
    assert plan.main_bytes(first) == PROGRAM_BYTES + first.leading + first.between
    away = plan_memory(on_cuda(job(tmp_path, strategy=strategy, island=island + "offload = true")))
    assert away.device_bytes(away.ranks[1]) == away.ranks[1].passing
    last = away.ranks[1]
    assert away.main_bytes(last) == PROGRAM_BYTES + last.static


ASYNC = 'ranks = 4\nschedule = "async"\nmicrobatches = '
AHEAD = 'optimizer = "torch:NAdam"'
UNTIED = "layers = 6\nwidth = 16\nheads = 2\ncontext = 8\ntie = false"


@pytest.mark.parametrize(("microbatches", "delays"), [(1, (3, 2, 1, 0)), (4, (1, 1, 1, 0))])
def test_weights_of_batches_in_flight_are_counted(
    tmp_path: Path, microbatches: int, delays: tuple[int, ...]
) -> None:
    island = ASYNC + str(microbatches)
    spec = job(tmp_path, sizes=UNTIED, train=AHEAD, strategy='inner = "pipeline"', island=island)
    for rank, delay in zip(plan_memory(spec).ranks, delays, strict=True):
        assert rank.stashed == delay * rank.parameters
        parts = rank.parameters, rank.stashed, rank.gradients, rank.optimizer, rank.buffers
        assert rank.static == sum(parts)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"batch": 6, "strategy": 'inner = "ddp"', "island": "ranks = 4"}, "evenly"),
    "stages": ({"strategy": 'inner = "pipeline"', "island": "ranks = 64"}, "more stages than"),
    "heads": ({"strategy": 'inner = "tensor"', "island": "ranks = 4"}, "shared evenly"),
    "muon": (
        {"train": 'optimizer = "muon"', "strategy": 'inner = "fsdp"', "island": "ranks = 2"},
        "needs whole parameters",
    ),
    "no look-ahead": (
        {"sizes": UNTIED, "strategy": 'inner = "pipeline"', "island": ASYNC + "2"},
        "looks ahead",
    ),
    "tied stages": (
        {
            "train": AHEAD,
            "strategy": 'inner = "pipeline"',
            "island": 'ranks = 2\nschedule = "async"',
        },
        "share a weight",
    ),
    "tied head": (
        {"strategy": 'inner = "pipeline"', "island": 'ranks = 2\nactivations = "subspace:4"'},
        "confined to a subspace",
    ),
    "state": (
        {
            "strategy": 'inner = "pipeline"',
            "island": 'ranks = 2\nactivations = "feedback(topk:0.1)"',
        },
        "with this codec",
    ),
    "plan": (
        {"strategy": 'inner = "tensor"', "island": 'ranks = 2\nplan = { upp = "column" }'},
        "names a module that the model does not have",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_refuses_a_plan_refuses(tmp_path: Path, name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        plan_memory(job(tmp_path, **options))


def test_unknown_model_and_other_kinds_of_jobs_are_refused(tmp_path: Path) -> None:
    spec = job(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'gpt'"):
        plan_memory(replace(spec, model=replace(spec.model, name="gptt")))
    with pytest.raises(ConfigError, match="kind 'script'"):
        plan_memory(replace(spec, job=replace(spec.job, script="x.py")))


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Any], int], str]] = {
    "recompute": ({}, lambda plan: plan.worst_bytes - 100_000, 'recompute = "full"'),
    "rows": (
        {"train": 'recompute = "full"\nprecision = "bf16"'},
        lambda plan: plan.worst_bytes - plan.ranks[0].passing // 3,
        "accumulate = ",
    ),
    "shards": (
        {"strategy": 'inner = "ddp"\npreset = "alone"', "island": "ranks = 2"},
        lambda plan: plan.worst_bytes - plan.ranks[0].passing - plan.ranks[0].parameters,
        'inner = "fsdp" in [strategy] and ranks = ',
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_nearest_change_makes_it_fit(tmp_path: Path, name: str) -> None:
    options, limit_of, words = CHANGES[name]
    sizes = "layers = 4\nwidth = 256\nheads = 4\ncontext = 64"
    spec = job(tmp_path, sizes=sizes, **{"strategy": 'preset = "alone"', **options})
    plan = plan_memory(spec)
    limit = limit_of(plan)
    change = nearest_change(plan, limit_bytes=limit, data=None)
    assert change is not None
    assert change.words.startswith(words)
    assert change.worst_bytes == plan_memory(change.spec).worst_bytes <= limit


def test_nothing_helps_against_a_host_model_that_is_too_large(tmp_path: Path) -> None:
    spec = job(tmp_path, strategy='inner = "tensor"', island="ranks = 2")
    plan = plan_memory(spec)
    assert nearest_change(plan, limit_bytes=1_000_000, data=None) is None


def cli(spec: Any, folder: Path, *options: str) -> int:
    (folder / "job.toml").write_text(dump_spec(spec), encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        main(["plan", "memory", str(folder / "job.toml"), *options])
    return int(left.value.code or 0)


def test_command_shows_ranks_and_says_whether_they_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = job(tmp_path, strategy='inner = "pipeline"', island="ranks = 2")
    assert cli(spec, tmp_path, "--memory", "2GB") == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("rank 0", "rank 1", "activations", "fits", "host model"))
    assert "by their weights" in shown
    needy = replace(spec, needs=replace(spec.needs, memory_gb=0.001))
    assert cli(needy, tmp_path) == 1
    assert "does not fit" in capsys.readouterr().out


def test_command_prints_json_and_takes_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = job(tmp_path, strategy='inner = "fsdp"', island="ranks = 2")
    assert cli(spec, tmp_path, "--json", "--set", "island.ranks=4", "--memory", "16 GiB") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mesh"], found["limit_bytes"], found["fits"]) == ("shard=4", 16 * 2**30, True)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    first = found["ranks"][0]
    assert first["static"] == sum(
        first[part] for part in ("parameters", "stashed", "gradients", "optimizer", "buffers")
    )
    assert cli(spec, tmp_path, "--memory", "much") == 2
    assert "cannot be read" in capsys.readouterr().err
