"""A script that was written for Horovod runs, alone and with others."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import atoll.integrations.horovod as hvd
from atoll.errors import ConfigError
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
    assert not atoll.processes()
