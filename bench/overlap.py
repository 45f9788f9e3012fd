"""What a round beside training costs a step: `python -m bench.overlap [--quick]`.

The training thread does the same steps over and over, in windows: in every other window rounds run
on a background thread without a pause, one after the other: encode a vector of 8 million numbers
with int8 and error feedback, decode the mean. That is all of a round that this machine computes; in
between real rounds wait for the network, so this is worse than any. Medians over all pairs of
windows:

    step_ms       a step without anything beside it
    blocked       share of the time that the training thread was held up by something other than the
                  lack of a core, more than without rounds: what the interpreter lock costs
    slowdown      step time with rounds beside it / without, with its quartiles

Three kinds of steps: `python` runs only the interpreter, `small` is a training step of many small
operations, `large` one of a few large ones. As a yardstick the last row has a background thread
that computes in Python, which holds the interpreter lock as long as it is let. Torch runs on one
thread. `slowdown` needs two idle cores, or it shows how busy the machine is; `blocked` does not.
Linux only: /proc reports how long a thread ran and how long it waited for a core.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.clock import RealClock
from atoll.codec import make_codec
from atoll.group.base import Reduced
from atoll.group.single import SingleGroup
from atoll.strategies.rounds.round_client import RoundClient
from atoll.task import Task
from atoll.wire.messages import RoundPlan
from bench.kit.report import emit

ELEMENTS = 8_000_000
CODEC = "feedback(int8)"
PYTHON_LOOPS = 20_000


def python_step() -> Callable[[], None]:
    """Return a step of nothing but Python."""

    def step() -> None:
        total = 0
        for number in range(PYTHON_LOOPS):
            total += number & 3

    return step


def training_step(width: int, layers: int, batch: int) -> Callable[[], None]:
    """Return a training step of a chain of layers."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


STEPS: dict[str, Callable[[], Callable[[], None]]] = {
    "python": python_step,
    "small": lambda: training_step(32, 8, 8),
    "large": lambda: training_step(512, 4, 128),
}


class Rounds:
    """Rounds on a background thread, one after the other."""

    def __init__(self) -> None:
        """Have a vector, a codec and no partner."""
        self._vector = torch.randn(ELEMENTS) * 1e-3
        self._codec = make_codec(CODEC)
        model = nn.Linear(1, 1)
        self._task = Task(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self._round_client = RoundClient(SingleGroup(), RealClock())
        self.seconds: list[float] = []

    def exchange(self, plan: RoundPlan) -> Reduced:
        """Do what a member computes in a round."""
        began = time.perf_counter()
        packet = self._codec.encode(self._vector, key="delta")
        mean = self._codec.base.decode(packet)
        self._codec.finish(committed=True)
        self.seconds.append(time.perf_counter() - began)
        return Reduced([mean], tuple(plan.members), 1.0, 0, 0, "alone")

    def one(self) -> None:
        """Hold a round as overlapped strategies do."""
        report = self._round_client.report(self._task, base="bench")
        work = self._round_client.start(self.exchange, report)
        self._round_client.apply_verdict(self._task, work.wait(), ahead=True)
        self._task.round += 1


@contextmanager
def beside(body: Callable[[], None]) -> Iterator[None]:
    """Repeat `body` on another thread inside."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            body()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30.0)


@dataclass(frozen=True, slots=True)
class Window:
    """What a stretch of steps took."""

    step_s: float
    """Mean time of a step."""
    blocked: float
    """Share of the time in which the thread neither ran nor waited for a core."""


def on_core(thread: int) -> float:
    """Return the seconds that a thread has run, or waited for a core to run on."""
    ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="utf-8").split()
    return (int(ran) + int(waited)) / 1e9


def window(step: Callable[[], None], *, seconds: float) -> Window:
    """Do steps for so many seconds."""
    thread, count = threading.get_native_id(), 0
    before, began = on_core(thread), time.perf_counter()
    while (now := time.perf_counter()) < began + seconds or count < 3:
        step()
        count += 1
    whole = now - began
    return Window(whole / count, max(0.0, 1.0 - (on_core(thread) - before) / whole))


def compare(
    step: Callable[[], None], body: Callable[[], None], *, pairs: int, seconds: float
) -> dict[str, Any]:
    """Return a row: medians over pairs of windows."""
    alone: list[Window] = []
    during: list[Window] = []
    for _ in range(pairs):
        alone.append(window(step, seconds=seconds))
        with beside(body):
            during.append(window(step, seconds=seconds))
    ratios = [b.step_s / a.step_s for a, b in zip(alone, during, strict=True)]
    blocked = [b.blocked - a.blocked for a, b in zip(alone, during, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "step_ms": round(1e3 * statistics.median(a.step_s for a in alone), 3),
        "blocked": round(statistics.median(blocked), 4),
        "slowdown": round(statistics.median(ratios), 3),
        "quartiles": [round(low, 3), round(high, 3)],
    }


def main() -> None:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few short windows")
    quick = parser.parse_args().quick
    pairs, seconds = (3, 0.2) if quick else (15, 0.8)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rounds = Rounds()
    rounds.one()
    rounds.seconds.clear()
    rows: list[dict[str, Any]] = []
    kinds = [(name, "rounds", rounds.one) for name in STEPS]
    for name, what, body in [*kinds, ("small", "python", python_step())]:
        step = STEPS[name]()
        row = compare(step, body, pairs=pairs, seconds=seconds)
        rows.append({"step": name, "beside": what, **row})
    round_ms = round(statistics.median(rounds.seconds) * 1e3, 2)
    emit({"elements": ELEMENTS, "codec": CODEC, "round_ms": round_ms, "rows": rows}, rows)


if __name__ == "__main__":
    main()
