"""The example scripts as modules, and as jobs of two real processes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.train.state.committed import CommittedState, adopt
from tests.e2e.conftest import Atoll

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    """Return an example as a module."""
    found = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


def run_on_two_nodes(atoll: Atoll, name: str, *, steps: int) -> dict[str, Tensor]:
    """Run an example as a job of two processes with a hub; return the weights it published."""
    both = ("--local", "2", "--set", "job.nodes=2", "--set", "job.min_nodes=2")
    script = str(EXAMPLES / f"{name}.py")
    done = atoll.run("run", script, *both, "--", "--steps", str(steps))
    assert done.code == 0, done.both
    assert all(len(members) == 2 for members in contributors(atoll.job_folder()))
    assert "node0 finished with held-out loss" in done.out
    losses = {line.split()[-1] for line in done.out.splitlines() if "finished with" in line}
    assert len(losses) == 1, done.out  # both members end with one model
    atoll.assert_ended()
    return load_file(atoll.job_folder() / "model.safetensors")


def contributors(folder: Path) -> list[list[str]]:
    """Return who contributed to each round of a job."""
    summary = json.loads((folder / "rounds.json").read_text(encoding="utf-8"))
    return [one["contributors"] for one in summary["rounds"]]


def assert_same(found: dict[str, Tensor], model: nn.Module, *, tolerance: float = 1e-6) -> None:
    """Compare published weights with those of a model, which may name tied ones twice."""
    state = model.state_dict()
    assert set(found) <= set(state)
    assert found
    for name, value in found.items():
        assert_close(value, state[name], rtol=0, atol=tolerance)


def take_over(run: Run, donor: Run) -> None:
    """Load the donor's committed state, as a member does that joins late or has recovered."""
    ours, theirs = run._optimizer, donor._optimizer
    assert ours is not None
    assert theirs is not None
    shared, inner = CommittedState(theirs.task, theirs.outer).parts()
    adopt(ours.task, ours.outer, shared=shared, inner=inner)
    assert isinstance(run.group, SingleGroup)
    run.group.committed_round = ours.task.round
