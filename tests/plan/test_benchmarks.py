"""Measurements of a small model on real ranks, and the command that plans with them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.cli.main import main
from atoll.config import JobSpec, RankPlace, dump_spec, read_spec
from atoll.errors import ConfigError, JobError
from atoll.models import GPTConfig
from atoll.plan.benchmarks import measure, memory_of, together
from atoll.plan.measured import Machine, Measured, UnitTimes, read_measured, write_measured
from atoll.plan.pipelines import Request, plan_pipelines
from atoll.plan.reductions import reductions
from atoll.strategies.inner.pipeline.hosts import Link
from tests.island.pool import Ranks
from tests.plan.jobs import job


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def pipeline_job(folder: Path, *, count: int = 2) -> JobSpec:
    return job(folder, strategy='inner = "pipeline"', island=f"ranks = {count}\nelastic = true")


def _measured(text: dict[str, object], machines: int) -> Measured | None:
    rank, count = dist.get_rank(), dist.get_world_size()
    each = count // machines
    place = RankPlace(
        rank, count, rank % each, "127.0.0.1", 1, each, machine=rank // each, machines=machines
    )
    return measure(read_spec(text), place=place, device=torch.device("cpu"))


def test_one_rank_alone_is_measured_and_stored(ranks: Ranks, tmp_path: Path) -> None:
    spec = pipeline_job(tmp_path, count=1)
    (found,) = ranks.run(1, _measured, tomllib.loads(dump_spec(spec)), 1)
    write_measured(found, tmp_path / "measured.json")
    assert read_measured(tmp_path / "measured.json") == found
    (only,) = plan_pipelines(found, Request.of(spec))
    assert (only.stages, only.replicas, only.reduce_s) == (1, 1, 0.0)


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.every(2)
def test_real_ranks_are_measured_and_planned_for(
    ranks: Ranks, tmp_path: Path, machines: int
) -> None:
    spec = pipeline_job(tmp_path, count=2)
    found, other = ranks.run(2, _measured, tomllib.loads(dump_spec(spec)), machines)
    assert other is None
    assert sorted(found.sizes) == [1, 2, 4, 8]
    assert [machine.ranks for machine in found.machines] == [2 // machines] * machines
    assert all(machine.cores >= 1 < machine.memory_bytes for machine in found.machines)
    for machine in found.machines:  # a rate for every number of its ranks
        assert len(machine.rates) == machine.ranks
        assert min(machine.rates) > 0
    for times in found.sizes.values():
        assert len(times.forward_s) == len(times.backward_s) == len(found.sent_bytes)
        assert min(times.forward_s) > 0
    assert found.near.latency_s > 0 < found.reduce[1][2].latency_s
    assert 0 < found.near.bytes_per_s < 1e14
    assert found.near.busy_s > 0 <= found.near.busy_s_per_byte
    assert found.sent_bytes[1] == 8 * 16 * 4  # context x width of one row
    plans = plan_pipelines(found, Request.of(spec, memory=memory_of(spec)))
    assert {(plan.stages, plan.replicas) for plan in plans} == {(1, 1), (2, 1), (1, 2)}
    assert all(plan.worst_bytes > 0 for plan in plans)


def _reduced() -> dict[int, dict[int, Link]]:
    units = Measured(
        machines=(), sizes={1: UnitTimes(forward_s=(1, 1, 1), backward_s=(1, 1, 1))},
        sent_bytes=(4, 4, 4), trained_bytes=(4, 80_000, 8), near=Link(), far=Link(),
    )  # fmt: skip
    sizes: list[int] = []
    reduce = dist.all_reduce

    def noted(tensor: Tensor, **words: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, **words)

    with patch.object(dist, "all_reduce", noted):
        found = reductions(units, (0, 0, 1, 1), device=torch.device("cpu"))
    assert set(sizes) <= {1, 20_003, 20_001, 20_002}, "of a stage's size"
    return found


def test_reductions_are_measured_for_every_shape_of_all_ranks(ranks: Ranks) -> None:
    first, *others = ranks.run(4, _reduced)
    for found in (first, *others):
        assert {p: sorted(links) for p, links in found.items()} == {1: [2, 3, 4], 2: [2]}
    assert all(link.latency_s > 0 for links in first.values() for link in links.values())


class _Crossed(nn.Module):
    """A model whose children are not applied one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.config = GPTConfig(context=8)
        self.tokens, self.out = nn.Embedding(256, 4), nn.Linear(4, 256)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.tokens(ids) + self.tokens(ids.flip(-1)))
        return found


def crossed(vocab_size: int, **sizes: object) -> nn.Module:
    return _Crossed()


def test_a_model_that_cannot_be_cut_is_not_measured(ranks: Ranks, tmp_path: Path) -> None:
    text = tomllib.loads(dump_spec(pipeline_job(tmp_path)))
    text["model"]["name"] = f"{__name__}:{crossed.__name__}"
    with pytest.raises(ConfigError, match=r"not applied one after the other.*units\(\)"):
        ranks.run(2, _measured, text, 1)


def kept(path: Path) -> Path:
    times = UnitTimes(forward_s=(0.001, 1, 1, 1), backward_s=(0.001, 2, 2, 2))
    write_measured(
        Measured(
            machines=(Machine(name="attic", ranks=2, cores=2, memory_bytes=10**12),),
            sizes={2: times, 4: times}, sent_bytes=(1, 1, 1, 1), trained_bytes=(4, 4, 4, 4),
            near=Link(0.001, 1e9), far=Link(0.001, 1e9), reduce={1: {2: Link(0.5, 1e9)}},
        ),
        path,
    )  # fmt: skip
    return path


def status_of(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["plan", "pipeline", *words])
    return int(left.value.code or 0)


def test_the_command_prints_every_plan_and_its_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(dump_spec(pipeline_job(tmp_path)))
    known = str(kept(tmp_path / "measured.json"))
    assert status_of(str(file), "--measured", known, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["best"] == output["plans"][0]
    assert {(p["stages"], p["replicas"]) for p in output["plans"]} == {(1, 1), (2, 1), (1, 2)}
    assert output["best"]["predicted_s"] == min(p["predicted_s"] for p in output["plans"])
    assert status_of(str(file), "--measured", known) == 0
    shown = capsys.readouterr().out
    assert "attic (2 ranks, 2 cores)" in shown
    assert "picks 1 stage x 2 replicas" in shown


def test_the_command_names_what_would_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(dump_spec(pipeline_job(tmp_path)))
    known = str(kept(tmp_path / "measured.json"))
    assert status_of(str(file), "--measured", known, "--memory", "1MB") == ConfigError.exit_code
    assert "stages that fit no offered machine" in capsys.readouterr().err


class SentOnce:
    """Work that only the first process gets: then the system has no room for another one."""

    sent = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.sent += 1
        if self.sent > 1:
            raise OSError(errno.EAGAIN, "no more processes")
        return SentOnce, ()


def _wait_for_ever(work: object, place: RankPlace) -> None:
    threading.Event().wait()


def test_ranks_end_if_another_one_cannot_be_started() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(JobError, match="no more processes"):
        together(_wait_for_ever, SentOnce(), ranks=2)
    assert multiprocessing.active_children() == before
