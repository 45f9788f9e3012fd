"""What slow, long lines cost each method: `python -m bench.slowlink [--quick]`, as root on Linux.

A hub and four nodes, each in a network namespace of its own, real processes and sockets; every
node's line has the rate of the row, 80 ms round trip. The hub's own line is fast. Members are
scripts (`bench/slowlink_member.py`): a step lasts `step_s`, most of which is slept, as on a machine
whose accelerator does the work.

seconds_to_loss  until the agreed parameters' held-out loss is at most `target`. null: the run ended
                 before. Where `extrapolated` is true the run was cut because its time was up, and
                 the number is its measured seconds per step times the steps that the method needs:
                 these were counted without a network, the same members on threads.
utilisation      share of the time that was computing, mean of the members: a step's `step_s`, or
                 its arithmetic where a busy machine makes that longer.
of_alone         the same divided by that of `alone`, which does not communicate at all.
bytes_per_node   sent by a member in the steps that were done, tensors only, mean of the four.

Rows that are done are kept: interrupted, it still prints its result.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.netlab.lab import Lab
from atoll.netlab.shape import Shape
from atoll.run import Run
from atoll.run.place import Membership
from bench.kit.cluster import ROOT
from bench.kit.report import emit
from bench.reduce import single_threaded
from bench.slowlink_member import MEMBERS, METHODS, SEED, make_data, make_model, train

RTT = "80ms"
HUB, PORT = 0, 7700
LISTENING = ("--port", str(PORT), "--advertise", f"h{HUB}")
SKIPPED = 10
"""First steps that do not count: connections are made in them."""
START_S = 60.0
END_S = 60.0

STOP = """
from atoll.cli.hub_access import find
with find().client() as client:
    for job in client.jobs():
        if job["state"] in ("running", "paused", "waiting"):
            client.stop(job["job"], grace_s=5.0)
"""


@dataclass(frozen=True)
class Plan:
    """How long, and how far."""

    rates_mbit: tuple[int, ...]
    methods: tuple[str, ...]
    steps: int
    target: float
    limit_s: float
    """After so many seconds of training a run is cut."""
    slow_limit_s: float
    """The same for data parallel, of which a few steps say enough."""
    step_s: float = 0.2

    def limit_of(self, method: str) -> float:
        """Return after how many seconds of training a run of this method is cut."""
        return self.slow_limit_s if method == "ddp" else self.limit_s


FULL = Plan((20, 100), tuple(METHODS), steps=220, target=2.3, limit_s=50.0, slow_limit_s=20.0)
QUICK = Plan(
    (20,), tuple(name for name in METHODS if name != "streaming-diloco e3m0"),
    steps=80, target=2.9, limit_s=18.0, slow_limit_s=12.0,
)  # fmt: skip


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


# ------------------------------------------------------------------------------ the machines


class Machines(Protocol):
    """A lab, or something else that starts programs on numbered hosts."""

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host."""
        ...

    def run(
        self, host: int, command: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host to its end."""
        ...


class Site:
    """A hub on host 0 and a node on each of the others, behind slow lines."""

    def __init__(
        self, folder: Path, lab: Machines, *, listening: Sequence[str] = LISTENING
    ) -> None:
        """Start nothing yet. `listening`: options of `atoll hub`."""
        self.folder, self.lab, self._listening = folder, lab, listening
        self._processes: list[subprocess.Popen[str]] = []
        self._ticket = ""

    def start(self, host: int, *words: str) -> subprocess.Popen[str]:
        """Start `atoll WORDS` on a host, which has a home of its own."""
        with (self.folder / f"host{host}.log").open("a", encoding="utf-8") as log:
            process = self.lab.popen(
                host, [sys.executable, "-m", "atoll.cli", *words], cwd=self.folder,
                env=self.environment(host), stdout=subprocess.PIPE if words[0] == "hub" else log,
                stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def gather(self, members: int = MEMBERS) -> None:
        """Start the hub and the nodes.

        Raises:
            RuntimeError: the hub does not start.
        """
        hub = self.start(HUB, "hub", *self._listening)
        while not self._ticket:
            line = hub.stdout.readline() if hub.stdout is not None else ""
            if not line:
                raise RuntimeError(f"the hub did not start: see {self.folder}/host0.log")
            words = line.split()
            self._ticket = next((word for word in words if word.startswith("atoll://")), "")
        for host in range(1, members + 1):
            self.join(host)

    def join(self, host: int) -> None:
        """Start the node of a host."""
        self.start(host, "join", self._ticket, "--name", f"n{host}")

    def stop_jobs(self) -> None:
        """Ask what runs to end after its present round."""
        command = [sys.executable, "-c", STOP]
        self.lab.run(HUB, command, env=self.environment(HUB), check=True, timeout=END_S)

    def environment(self, host: int) -> dict[str, str]:
        """Return the environment of the processes of a host."""
        return single_threaded() | {
            "ATOLL_HOME": str(self.folder / f"home{host}"), "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1", "COLUMNS": "200",
        }  # fmt: skip

    def close(self) -> None:
        """End everything."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def site(rate_mbit: int) -> Iterator[Site]:
    with (
        tempfile.TemporaryDirectory(prefix="slowlink-", ignore_cleanup_errors=True) as folder,
        Lab(hosts=MEMBERS + 1, rate=f"{rate_mbit}mbit", rtt=RTT) as lab,
    ):
        # Half of the round trip stays, so that from node to hub and back it is the whole.
        lab.shape(HUB, Shape(rtt_s=lab.shape_of(1).rtt_s))
        made = Site(Path(folder), lab)
        try:
            made.gather()
            yield made
        finally:
            made.close()


# ------------------------------------------------------------------------------- one method


def lines_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what every member has written so far."""
    found = {}
    for path in sorted(out.glob("w*.jsonl")):
        text = path.read_text(encoding="utf-8")
        found[path.stem] = [json.loads(line) for line in text.splitlines(True) if line[-1] == "\n"]
    return {member: lines for member, lines in found.items() if lines}


def run_method(place: Site, plan: Plan, method: str) -> dict[str, list[dict[str, Any]]]:
    """Run a job until its steps are done, or its time is up; return the members' lines.

    Raises:
        RuntimeError: it does not start.
    """
    out = place.folder / method.replace(" ", "-")
    out.mkdir()
    script = str(ROOT / "bench" / "slowlink_member.py")
    words = ["--method", method, "--steps", str(plan.steps), "--step-s", str(plan.step_s)]
    job = place.start(HUB, "run", script, "--nodes", str(MEMBERS), "--", *words, "--out", str(out))
    deadline = time.monotonic() + START_S
    while len(lines_of(out)) < MEMBERS and job.poll() is None:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    deadline = time.monotonic() + plan.limit_of(method)
    while job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    if job.poll() is None:
        place.stop_jobs()
        job.wait(END_S)
    found = lines_of(out)
    if len(found) < MEMBERS:
        log = (place.folder / f"host{HUB}.log").read_text(encoding="utf-8")
        raise RuntimeError(f"{method} did not run: {log[-2000:]}")
    return found


def row_of(
    plan: Plan, method: str, rate_mbit: int, found: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return one line of the result from the members' lines."""
    steps = min(lines[-1]["step"] for lines in found.values())
    skipped = min(SKIPPED, steps - 1)
    spans = {
        member: lines[steps - 1]["seconds"] - lines[skipped - 1]["seconds"]
        for member, lines in found.items()
    }
    computing = {
        member: sum(max(plan.step_s, line["worked_s"]) for line in lines[skipped:steps])
        for member, lines in found.items()
    }
    per_step = statistics.mean(spans.values()) / (steps - skipped)
    looks = [line for line in found["w0"] if "loss" in line]
    reached = next((line["seconds"] for line in looks if line["loss"] <= plan.target), None)
    outer = method.partition(" ")[0]
    return {
        "strategy": outer,
        "codec": METHODS[method][0],
        "rate_mbit": rate_mbit,
        "seconds_to_loss": reached if reached is None else round(reached, 1),
        "utilisation": round(statistics.mean(computing[m] / spans[m] for m in found), 4),
        "bytes_per_node": round(statistics.mean(x[-1]["sent_bytes"] for x in found.values())),
        "of_alone": 1.0,
        "seconds_per_step": round(per_step, 4),
        "steps": steps,
        "loss": looks[-1]["loss"] if looks else None,
        "cut": steps < plan.steps,
        "extrapolated": False,
        "method": method,
        "looks": [(line["step"], round(line["loss"], 3)) for line in looks],
    }


def steps_needed(plan: Plan, method: str) -> int | None:
    """Return the steps until the target: the same members on threads, without a network."""
    data, models = make_data(), [make_model() for _ in range(MEMBERS)]
    with tempfile.TemporaryDirectory() as folder:

        def body(group: Group) -> None:
            slot, out = int(group.me[1:]), Path(folder)
            with Run(group, Membership(out, seed=SEED, slot=slot, num_slots=MEMBERS)) as run:
                train(
                    run, model=models[slot], data=data, method=method, steps=plan.steps,
                    step_s=0.0, out=out,
                )  # fmt: skip

        MemoryGroups(MEMBERS).together(body, timeout_s=600.0)
        looks = [line for line in lines_of(Path(folder))["w0"] if "loss" in line]
    return next((line["step"] for line in looks if line["loss"] <= plan.target), None)


def extrapolate(plan: Plan, rows: list[dict[str, Any]]) -> None:
    """Fill in the seconds of methods that were cut, from the steps that they need."""
    cut = [row for row in rows if row["cut"] and row["seconds_to_loss"] is None]
    for method in dict.fromkeys(row["method"] for row in cut):
        say(f"finding how many steps {method} needs")
        steps = steps_needed(plan, method)
        for row in cut:
            if row["method"] == method and steps is not None:
                row["seconds_to_loss"] = round(steps * row["seconds_per_step"], 1)
                row["extrapolated"] = True


# -------------------------------------------------------------------------------------- all


def measure(plan: Plan, methods: Sequence[str], rows: list[dict[str, Any]]) -> None:
    """Add a row for every method at every rate."""
    for rate in plan.rates_mbit:
        with site(rate) as place:
            for method in methods:
                began = time.monotonic()
                row = row_of(plan, method, rate, run_method(place, plan, method))
                rows.append(row)
                compare_with_alone(rows)
                seconds = time.monotonic() - began
                say(
                    f"{rate} Mbit/s {method}: {row['steps']} steps of "
                    f"{row['seconds_per_step']:.3f} s, loss {row['loss']:.3f}, "
                    f"to {plan.target}: {row['seconds_to_loss']} s ({seconds:.0f} s)"
                )
    extrapolate(plan, rows)


def compare_with_alone(rows: list[dict[str, Any]]) -> None:
    """Fill in how each row's utilisation compares with no communication at its rate."""
    alone = {row["rate_mbit"]: row["utilisation"] for row in rows if row["strategy"] == "alone"}
    for row in rows:
        if row["rate_mbit"] in alone:
            row["of_alone"] = round(row["utilisation"] / alone[row["rate_mbit"]], 4)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.slowlink", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="20 Mbit/s only; under three minutes")
    parser.add_argument("--only", action="append", choices=METHODS, help="rows to measure")
    given = parser.parse_args()
    if reason := Lab.unavailable():
        say(f"no network lab here: {reason}")
        return 1
    plan, rows = QUICK if given.quick else FULL, list[dict[str, Any]]()
    began, interrupted = time.monotonic(), False
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure(plan, given.only or plan.methods, rows)
    except KeyboardInterrupt:
        interrupted = True
    result = {
        "rows": rows, "target": plan.target, "step_s": plan.step_s, "rtt": RTT,
        "members": MEMBERS, "parameters": sum(p.numel() for p in make_model().parameters()),
        "interrupted": interrupted, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    emit(result, [{k: v for k, v in row.items() if k not in ("looks", "method")} for row in rows])
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
