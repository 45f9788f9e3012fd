"""What no kind of process may load to start: it costs every user of it seconds or memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TORCH = {"torch", "numpy", "safetensors", "transformers", "tokenizers"}
OPTIONAL = {
    "cryptography", "docker", "gymnasium", "nats", "opentelemetry", "zeroconf",
}  # fmt: skip
"""What only some jobs, places and verbs need."""
SERVING = {"uvicorn", "starlette"}
ASKING = {"httpx", "rich", "websockets"}
PARALLEL = {
    "torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "torch.distributed.tensor",
    "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
}  # fmt: skip
"""Parts of torch that islands need, or models that are compiled."""

STARTS = {
    "a command that only tells about itself": (
        ["atoll.cli.main"],
        TORCH | OPTIONAL | SERVING | ASKING | {"psutil", "asyncio"},
    ),
    "a verb that asks a hub": (
        ["atoll.cli.hub_access", "atoll.cli.views.screen"],
        TORCH | OPTIONAL | SERVING | {"httpx._main", "pygments"},
    ),
    "a hub": (["atoll.hub.__main__"], TORCH | OPTIONAL | {"httpx", "rich"}),
    "a node": (["atoll.node.__main__"], TORCH | OPTIONAL | SERVING),
    "the supervisor of an island": (
        ["atoll.node.worker", "atoll.node.islands.supervisor"],
        TORCH | OPTIONAL | SERVING | ASKING,
    ),
    "the writer of checkpoints": (
        ["atoll.checkpoint.background.writer"],
        TORCH | OPTIONAL | SERVING,
    ),
    "a member without ranks, a script, a policy or a reducer": (
        [
            "atoll.train.join_job",
            "atoll.train.trainer",
            "atoll.run",
            "atoll.rl.run",
            "atoll.reducer.server",
            "atoll.train.swarm.run",
            "atoll.train.paths.trainer",
        ],
        PARALLEL | OPTIONAL | SERVING | {"transformers", "tokenizers"},
    ),
}
"""Kind of process -> what it imports to start, and what must not come with it."""

TELL = """
import importlib, sys, traceback

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in FORBIDDEN:
            frames = [f for f in traceback.extract_stack() if "importlib" not in f.filename]
            where = " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(frames[-5:-1]))
            found.append(f"{name}, imported by {where}")
        return None

found = []
sys.meta_path.insert(0, Watch())
for module in MODULES:
    importlib.import_module(module)
if found:
    sys.exit("\\n".join(found))
"""


@pytest.mark.parametrize("kind", STARTS)
def test_starting_loads_nothing_that_it_does_not_need(kind: str) -> None:
    modules, forbidden = STARTS[kind]
    code = f"MODULES, FORBIDDEN = {modules!r}, {forbidden!r}\n{TELL}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
