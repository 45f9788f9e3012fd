"""What docs/guide/environments.md shows works as it stands there."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.rl.actor.collector import Collector
from atoll.rl.environments.environment import task_of
from atoll.rl.environments.film import record
from atoll.rl.environments.vector_env import VectorEnv
from atoll.rl.nets.policy import Policy

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "guide" / "environments.md"


def blocks(language: str) -> list[str]:
    """Return the examples in one language."""
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


def tables() -> list[dict[str, Any]]:
    return [
        table for block in blocks("toml")
        for table in tomllib.loads(block).get("rl", {}).get("policies", [])
    ]  # fmt: skip


@pytest.mark.parametrize("given", tables(), ids=lambda given: given["name"])
def test_every_environment_in_an_example_can_be_lived_in(given: dict[str, Any]) -> None:
    columns = VectorEnv(PolicyTable(**given), count=2, seed=1)
    task = task_of(PolicyTable(**given), RlTable(), columns.environments[0])
    policy = Policy(task, hidden=(8,), generator=torch.Generator().manual_seed(0))
    assert Collector(columns, task).collect(policy, 5).check().steps == 10 * columns.agents


def test_custom_environment_runs_restores_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worlds.py").write_text(blocks("python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "worlds", raising=False)
    table = PolicyTable(name="own", env="worlds:corridor", options={"length": 5})
    first, second = (VectorEnv(table, count=2, seed=1) for _ in range(2))
    task = task_of(table, RlTable(), first.environments[0])
    policy = Policy(task, hidden=(8,), generator=torch.Generator().manual_seed(0))
    collector, other = Collector(first, task), Collector(second, task)
    assert collector.collect(policy, 60).check().returns
    other.load_state_dict(collector.state_dict())
    assert first.unrepeatable == second.unrepeatable == 0
    again, right = other.collect(policy, 60), collector.collect(policy, 60)
    assert torch.equal(again.observations, right.observations)
    assert record(policy, table, tmp_path / "own.gif", seed=1).frames > 1
    monkeypatch.delitem(sys.modules, "worlds")
