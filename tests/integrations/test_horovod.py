"""A script that was written for Horovod runs, alone and with others."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll.integrations.horovod as hvd
from atoll.errors import ConfigError, GroupError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.run import Run
from atoll.run.place import Membership
from tests.e2e.conftest import ROOT, Atoll
from tests.patience import PATIENCE_S

EXAMPLE = ROOT / "examples" / "horovod_script.py"
END = re.compile(r"rank (\d) of (\d) ends with (-?[\d.]+)")


@pytest.fixture
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_functions_before_init_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match="init"):
        hvd.rank()


@pytest.mark.usefixtures("alone")
def test_a_process_alone_has_the_whole_interface() -> None:
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size(), hvd.members()) == (0, 1, 1)
    assert (hvd.local_rank(), hvd.local_size()) == (0, 1)
    model = nn.Linear(2, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hvd.broadcast_parameters(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    inner = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer)
    plain, reference = nn.Linear(2, 2), torch.ones(4, 2)
    plain.load_state_dict(model.state_dict())
    other = torch.optim.SGD(plain.parameters(), 0.5, momentum=0.9)
    for _ in range(3):
        for net, stepper in ((model, optimizer), (plain, other)):
            stepper.zero_grad()
            net(reference).square().sum().backward()
            stepper.step()
    assert torch.equal(model.weight, plain.weight)  # the same as without it, bit for bit
    values = torch.tensor([1.0, 2.0])
    assert hvd.allreduce(values, op=hvd.Sum).tolist() == [1.0, 2.0]
    assert hvd.allreduce_(values) is values
    assert hvd.broadcast_(values, 0) is values
    assert hvd.broadcast_object({"epoch": 3, "x": [1.5]}) == {"epoch": 3, "x": [1.5]}
    hvd.barrier()


def of_each(body: Callable[[], Any], tmp_path: Path) -> list[Any]:
    """Run a Horovod script on two members whose numbers are 1 and 2: the one of 0 is lost."""
    mine = threading.local()

    def member(group: Group) -> Any:
        slot = int(group.me[1:]) + 1
        with Run(group, Membership(tmp_path, slot=slot, num_slots=3)) as run:
            mine.run = run
            return body()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvd, "the_run", lambda: mine.run)
        return MemoryGroups(2).run(member)


def test_the_first_that_is_left_stands_for_rank_0(tmp_path: Path) -> None:
    found = of_each(lambda: hvd.broadcast_object({"rank": hvd.rank()}), tmp_path)
    assert found == [{"rank": 1}] * 2


def test_an_object_of_a_lost_rank_is_an_error(tmp_path: Path) -> None:
    found = of_each(lambda: hvd.broadcast_object(None), tmp_path)
    assert all(isinstance(one, GroupError) for one in found)


def test_a_failure_at_the_end_is_the_exit_status(tmp_path: Path) -> None:
    script = "import atoll.integrations.horovod as hvd\nhvd.init()\nhvd.the_run().finish = 1 / 0"
    late = script.replace("1 / 0", "lambda: 1 / 0")
    for text, status in ((script, 1), (late, 1), (script.partition("hvd.the")[0], 0)):
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        assert ("ZeroDivisionError" in done.stderr) == bool(status)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "what"), [({"op": hvd.Sum}, "averaged"), ({"backward_passes_per_step": 0}, "pass")]
)
def test_what_differs_is_refused(options: dict[str, object], what: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=what):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)  # type: ignore[arg-type]


@pytest.mark.e2e
@pytest.mark.long(
    "tests/integrations/test_horovod.py::test_a_process_alone_has_the_whole_interface"
)
def test_example_runs_alone(atoll: Atoll) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--epochs", "2"], cwd=atoll.folder,
        env=atoll.environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert END.search(done.stdout)


@pytest.mark.e2e
def test_example_trains_one_model_on_two_nodes(atoll: Atoll) -> None:
    done = atoll.run("run", str(EXAMPLE), "--local", "2", "--", "--epochs", "4")
    assert done.code == 0, done.both
    ends = {rank: total for rank, _, total in END.findall(done.both)}
    assert ends.keys() == {"0", "1"}
    assert ends["0"] == ends["1"]
    assert "right on 2 members" in done.both
    atoll.assert_ended()
