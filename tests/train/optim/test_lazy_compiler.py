"""Training that compiles nothing loads no compiler, and one that compiles finds torch as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]

KINDS = """
import sys
import torch
from atoll.config import JobSpec, TrainTable
from atoll.models import build_model
from atoll.train.optim.optimizers import build_optimizer
from atoll.train.optim.lazy_compiler import COMPILER, leave_out_compiler

OPTIMIZERS = ("adamw", "sgd", "muon", "torch:Adam", "torch:RMSprop", "torch:NAdam")

def trained(name):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = build_optimizer(model, TrainTable(optimizer=name, lr=0.1))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(calls) == 3
    return torch.cat([p.detach().flatten() for p in model.parameters()]), model, optimizer
"""
"""Trains with many kinds of optimizers."""

WITHOUT = """
before = {name: trained(name)[0] for name in OPTIMIZERS}
with torch.device("meta"):
    build_model("gpt")
assert COMPILER not in sys.modules, "the compiler was loaded"
"""
COMPILED = """
_, model, optimizer = trained("sgd")  # made before the compiler is there
calls = []
optimizer.register_step_pre_hook(lambda *_: calls.append(1))

def step():
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()

def reference():
    reference = trained("sgd")
    reference[2].zero_grad()
    reference[1](torch.ones(3, 4)).square().sum().backward()
    reference[2].step()
    return reference[1]

torch.compile(step, backend="eager")()
assert COMPILER in sys.modules
assert calls == [1], calls
for ours, theirs in zip(model.parameters(), reference().parameters(), strict=True):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
for name, found in before.items():
    torch.testing.assert_close(trained(name)[0], found, rtol=0, atol=0)
leave_out_compiler()  # it is there: nothing is changed any more
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"] is not (
    torch.optim.Optimizer.zero_grad.__wrapped__
)
"""


def run(code: str) -> None:
    """Run code in a process of its own, in which nothing is loaded yet."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
        timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_no_compiler_is_loaded_before_first_use() -> None:
    run(KINDS + WITHOUT + COMPILED)


def test_another_torch_than_the_known_one_is_left_alone() -> None:
    run(
        "import torch\n"
        "from atoll.train.optim import lazy_compiler\n"
        "step = torch.optim.SGD.step\n"
        "lazy_compiler.REGISTRAR = lazy_compiler.STEPPING = 'elsewhere'\n"
        "lazy_compiler.leave_out_compiler()\n"
        "assert torch.optim.SGD.step is step\n"
        "assert not vars(torch.optim.Optimizer.zero_grad.__wrapped__)\n"
        "lazy_compiler.leave_out_compiler()\n"
    )
