"""What starting costs: `python -m bench.startup [--quick]`, one JSON object on standard output.

    processes   processor seconds (user and system) until a process is of use: a verb has answered,
                a hub listens, a node is at its hub
    jobs        processor seconds of every process of `atoll run` with a job of two steps, by kind,
                and the seconds from the command to its end

Processor time is what counts: programs beside it change it less than seconds on the clock. Every
figure is the median of its repeats; those of one kind of process in a job are of its mean there.
`torch` is Python with `import torch` and nothing else, not even an end in order: what no process
that computes can go below.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from atoll.cli.hub_access import KnownHub, remember
from bench.kit.report import emit

READY_S = 60.0
JOB_S = 600.0
LOOK_S = 0.01
"""Pause between two looks at a job's processes: what they use after the last one is not counted."""

MODULES = {
    "atoll.cli": "command",
    "atoll.hub": "hub",
    "atoll.node": "node",
    "atoll.reducer": "reducer",
    "atoll.node.worker": "worker",
}
"""Module that a process runs -> its kind."""

TRAIN = """
[job]
name = "{name}"
nodes = 1
[model]
layers = 1
width = 16
heads = 2
context = 16
[data]
corpus = "files:{text}"
[train]
steps = 2
batch = 4
warmup = 1
eval_tokens = 512
[strategy]
preset = "diloco"
every = 1
{more}
"""
SCRIPT = """
import torch
import atoll

model = torch.nn.Linear(4, 1)
data = [torch.ones(2, 4) for _ in range(2)]
with atoll.join() as run:
    own = torch.optim.AdamW(model.parameters(), 1e-3)
    optimizer = run.wrap(model, own, outer=atoll.DiLoCo(every=1))
    for batch in run.shard(data):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
"""
POLICY = """
[job]
name = "{name}"
nodes = 2
[rl]
steps = 64
environments = 2
rollout = 32
epochs = 1
minibatches = 1
critic_epochs = 1
critic_minibatches = 1
hidden = [8]
critic_hidden = [8]
[[rl.policies]]
name = "pole"
env = "atoll.rl.environments.physics:cartpole"
"""
INNERS = ("ddp", "fsdp", "tensor", "pipeline")


class Times:
    """Processor seconds of a process and all it starts, by process, as last seen."""

    def __init__(self, root: int) -> None:
        """Look at nothing yet."""
        self._root = root
        self._known: dict[int, psutil.Process] = {}
        self._kinds: dict[int, str] = {}
        self._seconds: dict[int, float] = {}

    def look(self) -> None:
        """See how far each is."""
        with suppress(psutil.NoSuchProcess):
            root = self._known.setdefault(self._root, psutil.Process(self._root))
            for process in root.children(recursive=True):
                self._known.setdefault(process.pid, process)
        for pid, process in self._known.items():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                if words := process.cmdline():  # one that has ended has none
                    self._kinds[pid] = kind_of(words, process)
                    self._seconds[pid] = times.user + times.system

    def by_kind(self) -> dict[str, list[float]]:
        """Return the seconds of every process."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for pid, seconds in self._seconds.items():
            found[self._kinds[pid]].append(seconds)
        return dict(found)


def kind_of(words: Sequence[str], process: psutil.Process) -> str:
    """Return what a process of a job is; the supervisor of ranks differs from them by its place."""
    module = words[words.index("-m") + 1] if "-m" in words else ""
    kind = MODULES.get(module, "other")
    if kind == "worker":
        variables = process.environ()
        if variables.get("ATOLL_SUPERVISED"):
            return "rank"
    return kind


class Startup:
    """A folder in which things are started."""

    def __init__(self, folder: Path) -> None:
        """Write the text that jobs train on."""
        self.folder = folder
        words = random.Random(5)
        known = ["".join(words.choices("abcdefgh", k=5)) for _ in range(50)]
        self._text, self._errors = folder / "text.txt", folder / "errors.txt"
        self._text.write_text(" ".join(words.choices(known, k=12_000)), encoding="utf-8")

    @property
    def _environment(self) -> dict[str, str]:
        own = {"ATOLL_HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        return {**os.environ, **own}

    def _popen(self, *words: str) -> subprocess.Popen[bytes]:
        with self._errors.open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    def _failed(self, what: str, code: int) -> RuntimeError:
        said = self._errors.read_text("utf-8", "replace")
        return RuntimeError(f"{what} ended with {code}: {said[-2000:]}")

    # ------------------------------------------------------------------------- processes

    def whole(self, *words: str) -> float:
        """Return the processor seconds of a program from its start to its end.

        Raises:
            RuntimeError: it failed.
        """
        popen = self._popen(*words)
        if popen.stdout:
            popen.stdout.read()
        _, status, used = os.wait4(popen.pid, 0)
        popen.returncode = os.waitstatus_to_exitcode(status)
        if popen.stdout:
            popen.stdout.close()
        if popen.returncode:
            raise self._failed(" ".join(words), popen.returncode)
        return used.ru_utime + used.ru_stime

    def hub_and_node(self) -> tuple[float, float, float]:
        """Return what a hub, a node and a verb that asks the hub have used when they are ready."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        hub = self._popen(
            "-m", "atoll.hub", "--data", str(place / "hub"), "--jobs", str(place / "jobs")
        )
        node = None
        try:
            ready = json.loads(first_line(hub))
            hub_s = used_s(hub.pid)
            node = self._popen(
                "-m", "atoll.node", "--no-measure", "--home", str(place / "node"),
                "--ticket", ready["ticket"],
            )  # fmt: skip
            first_line(node)
            node_s = used_s(node.pid)
            token = ready["operator_token"]
            remember(KnownHub(ready["url"], token, operator=True), home=self.folder / "home")
            return hub_s, node_s, self.whole("-m", "atoll.cli", "status")
        finally:
            for popen in filter(None, (node, hub)):
                popen.send_signal(signal.SIGTERM)
                popen.communicate(timeout=READY_S)

    # ------------------------------------------------------------------------------ jobs

    def run(self, what: str) -> dict[str, float]:
        """Run a job of two steps; return the processor seconds by kind, and `wall_s`.

        Raises:
            RuntimeError: it failed.
        """
        began = time.perf_counter()
        nodes = "2" if what == "rl" else "1"  # a policy and its critic
        popen = self._popen("-m", "atoll.cli", "run", str(self._job(what)), "--local", nodes)
        times = Times(popen.pid)
        while popen.poll() is None:
            if time.perf_counter() > began + JOB_S:
                popen.kill()
            times.look()
            time.sleep(LOOK_S)
        wall_s = time.perf_counter() - began
        if popen.stdout:
            popen.stdout.close()
        if popen.returncode:
            raise self._failed(f"the job {what}", popen.returncode)
        found = {kind: statistics.mean(all_) for kind, all_ in times.by_kind().items()}
        found["total"] = sum(sum(all_) for all_ in times.by_kind().values())
        return found | {"wall_s": wall_s}

    def _job(self, what: str) -> Path:
        """Write a job; return its file."""
        path = self.folder / f"{what}.toml"
        given = {"name": what, "text": str(self._text), "more": ""}
        text = TRAIN
        if what == "script":
            path = path.with_suffix(".py")
            text, given = "{script}", {"script": SCRIPT}
        elif what == "rl":
            text = POLICY
        elif what != "train":
            given |= {"more": f'inner = "{what}"\n[island]\nranks = 2'}
        if what == "pipeline":
            text = text.replace("layers = 1", "layers = 2")
        path.write_text(text.format(**given), encoding="utf-8")
        return path


def first_line(popen: subprocess.Popen[bytes]) -> bytes:
    """Return the first line of a process.

    Raises:
        TimeoutError: it says nothing, or has ended.
    """
    assert popen.stdout is not None
    ready, _, _ = select.select([popen.stdout], (), (), READY_S)
    line = popen.stdout.readline() if ready else b""
    if not line:
        raise TimeoutError(f"process {popen.pid} did not start")
    return line


def used_s(pid: int) -> float:
    """Return the processor seconds of a process that runs."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure_processes(startup: Startup, repeats: int) -> dict[str, float]:
    """Return the medians of single processes."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    alone: Mapping[str, Callable[[], float]] = {
        "torch": lambda: startup.whole("-c", "import os, torch; os._exit(0)"),
        "atoll --help": lambda: startup.whole("-m", "atoll.cli", "--help"),
    }
    for _ in range(repeats):
        for name, measured in alone.items():
            found[name].append(measured())
        hub_s, node_s, status_s = startup.hub_and_node()
        for name, seconds in {"hub": hub_s, "node": node_s, "atoll status": status_s}.items():
            found[name].append(seconds)
    return {name: round(statistics.median(all_), 3) for name, all_ in found.items()}


def measure_jobs(startup: Startup, repeats: int, jobs: list[str]) -> dict[str, dict[str, float]]:
    """Return the medians of jobs, by kind of process."""
    found = {}
    for what in jobs:
        rows = [startup.run(what) for _ in range(repeats)]
        kinds = sorted({kind for row in rows for kind in row})
        found[what] = {
            kind: round(statistics.median(row.get(kind, 0.0) for row in rows), 3) for kind in kinds
        }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="once; one job")
    parser.add_argument("--jobs", default=",".join(["train", "script", "rl", *INNERS]))
    given = parser.parse_args()
    repeats = 1 if given.quick else given.repeats
    jobs = ["train"] if given.quick else [name for name in given.jobs.split(",") if name]
    with tempfile.TemporaryDirectory() as folder:
        startup = Startup(Path(folder))
        processes = measure_processes(startup, repeats)
        found = measure_jobs(startup, repeats, jobs)
    table = [{"what": name, "kind": "process", "seconds": all_} for name, all_ in processes.items()]
    table += [
        {"what": job, "kind": kind, "seconds": seconds}
        for job, kinds in found.items()
        for kind, seconds in kinds.items()
    ]
    emit({"processes": processes, "jobs": found}, table)


if __name__ == "__main__":
    main()
