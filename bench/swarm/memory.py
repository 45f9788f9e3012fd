"""The memory of a member of each stage: `python -m bench.swarm.memory [--stages N] [--quick]`.

A process per stage takes its stage out of a GPT of 400 MB and trains a step on random activations,
with the copies that a member makes of its sum and of its state. One more process builds the whole
model. The system reports the most memory that each had (`VmHWM`, elsewhere `ru_maxrss`).

One JSON object on stdout, in bytes: `model`; `program` of a process that has loaded the code only;
`whole_built` of the process with the whole model; and by stage `built`, `trained` and `planned`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.kit.report import emit

STAGES = 8
JOB = """
[job]
name = "memory"
[model]
name = "gpt"
layers = {layers}
width = {width}
heads = 8
context = 64
[data]
corpus = "files:{text}"
[train]
steps = 2
batch = 16
[strategy]
preset = "swarm"
[swarm]
stages = {stages}
"""


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # the other figure is at least that of the process that started this one
        (line,) = [x for x in status.read_text("utf-8").splitlines() if x.startswith("VmHWM:")]
        return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def child(what: str, path: Path) -> dict[str, int]:
    """Return the peaks of this process; `what` is a stage, `whole` or `program`."""
    from atoll.config import load_spec
    from atoll.strategies.inner.swarm.stage import StageCut
    from atoll.train.build import load_data, whole_model
    from atoll.train.partly import building_bytes
    from atoll.train.swarm.build import JobStages
    from atoll.wire.swarm import SwarmPlace

    spec = load_spec(path)
    if what in ("whole", "program"):
        data = load_data(spec)
        # Loads what taking a stage does, sympy among it; it allocates nothing.
        building_bytes(spec, data, StageCut(stages=spec.swarm.stages), whole_bytes=0)
        model = whole_model(spec, data) if what == "whole" else None
        return {"built": peak_bytes(), "alive": int(model is not None)}
    stages = JobStages(spec, StageCut(stages=spec.swarm.stages), member="w0")
    trained = stages.take(SwarmPlace(epoch=1, stage=int(what), step=0))
    built = peak_bytes()
    _train(trained, stages.rows(spec.swarm.microbatches))
    return {"built": built, "trained": peak_bytes()}


def _train(trained: Any, rows: Any) -> None:
    """Do a step with its copies, as `train/swarm/keeping.py` and `states.py` make them."""
    import torch

    from atoll.checkpoint.format.memory_image import MemoryImage
    from atoll.strategies.inner.swarm.runner import MicrobatchKey

    runner, images, sums = trained.runner, [], []
    stage = runner.stage
    width = 0 if stage.first else next(p.shape[-1] for p in stage.parameters().values())
    for index in range(4):
        key = MicrobatchKey(0, index)
        inputs, targets = rows(0, index)
        given = inputs if stage.first else torch.randn(*inputs.shape, width)
        if stage.last:
            runner.loss(key, (given,), targets)
        else:
            (output,) = runner.forward(key, (given,))
            runner.backward(key, [torch.randn_like(output)])
        if index % 2:
            runner.fold(MicrobatchKey(0, index - 1))
            runner.fold(key)
            sums.append(runner.gradient()[0])
    for _ in range(2):
        sums.append(torch.frombuffer(bytearray(sums[0].numpy().tobytes()), dtype=torch.float32))
    vector, total = runner.gradient()
    trained.update(vector, rows=total.rows)
    for _ in range(2):
        images.append(MemoryImage(trained.part()))


def measure(what: str, path: Path) -> dict[str, int]:
    """Run a process, and return its peaks."""
    command = [sys.executable, "-m", "bench.swarm.memory", "--child", what, "--job", str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, int] = json.loads(output.splitlines()[-1])
    return found


def job_of(folder: Path, *, stages: int, width: int, layers: int) -> Path:
    """Write a job and its text; return its file."""
    text, path = folder / "text.txt", folder / "job.toml"
    words = "".join(f"{n} squared is {n * n}. " for n in range(2000))
    text.write_text(words, encoding="utf-8", newline="\n")
    job = JOB.format(layers=layers, width=width, text=text, stages=stages)
    path.write_text(job, encoding="utf-8", newline="\n")
    return path


def run(folder: Path, *, stages: int, width: int, layers: int) -> dict[str, Any]:
    """Return all figures of a job."""
    from atoll.config import load_spec
    from atoll.plan.swarm import plan_swarm

    path = job_of(folder, stages=stages, width=width, layers=layers)
    plan = plan_swarm(load_spec(path))
    found: dict[str, Any] = {"model": plan.model_bytes}
    found["program"] = measure("program", path)["built"]
    found["whole_built"] = measure("whole", path)["built"]
    found["stages"] = [
        {**measure(str(number), path), "planned": plan.main_bytes(stage)}
        for number, stage in enumerate(plan.stages)
    ]
    return found


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=STAGES)
    parser.add_argument("--quick", action="store_true", help="a model of 100 MB")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.stdout.write(json.dumps(child(options.child, options.job)) + "\n")
        return
    width = 512 if options.quick else 1024
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), stages=options.stages, width=width, layers=8)
    emit(found, found["stages"])


if __name__ == "__main__":
    main()
