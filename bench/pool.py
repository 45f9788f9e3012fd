"""Machines that come and go by plan: `python -m bench.pool [--quick]`, one JSON object on stdout.

Adaptive compute pools as in DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105, figure
on the adaptive compute pool): the same small GPT with the same seed on a constant number of
machines, on a growing, a shrinking and a jumping one. Real hub, real node agents: a machine comes
when its agent is started and goes when its agent is asked to leave. A scenario's machines change
after equally many steps; its length is chosen so that all scenarios train on about as many tokens.
What a newcomer misses while its process starts is missing in the tokens too, so each loss is
compared with that of a constant pool at the tokens that were really committed (two constant pools,
one with four fifths of the tokens, give the line between them).

    loss        held-out, nats per token, of the final parameters
    curve       (committed tokens, held-out loss) of every evaluation
    identical   all members that were there at the end have the same parameters
    expected    loss of the constant pool of half size at as many tokens
    noise       how far two constant pools with different seeds are apart, doubled, at least 0.02
    agree       no elastic pool is more than that above what the constant pools span
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import AtollError
from bench.chaos.run import write_text
from bench.kit.cluster import Cluster
from bench.kit.report import emit

EVERY, BATCH, CONTEXT = 10, 4, 64
PER_PART = EVERY * BATCH * CONTEXT
"""Tokens of one member's part in one round."""

EVALUATE_ROUNDS, EVALUATE_TOKENS = 4, 4096
POLL_S = 0.25
LEAST_NOISE = 0.02
SPEC = """
[job]
name = "{name}"
nodes = {{min = 1, max = {most}}}
route = "relay"
seed = {seed}
[model]
layers = 2
width = 48
heads = 4
context = {context}
[data]
corpus = "files:{text}"
[train]
steps = {steps}
batch = {batch}
lr = 3e-3
final_lr = 0.02
warmup = 20
pace = "equal"
eval_every = {evaluate_rounds}
eval_tokens = {evaluate_tokens}
[strategy]
preset = "diloco"
codec = "fp32"
every = {every}
shared_steps = 0
[checkpoint]
every = 50
"""


@dataclass(frozen=True)
class Scenario:
    """How many machines there are, in stretches of equally many steps."""

    name: str
    machines: tuple[int, ...]
    seed: int = 7
    share: float = 1.0
    """Of the tokens of the others."""

    def wanted(self, share: float) -> int:
        """Return how many machines there should be when a share of the steps is done."""
        return self.machines[min(len(self.machines) - 1, int(share * len(self.machines)))]

    def steps(self, tokens: int) -> int:
        """Return the steps in which they train on so many tokens."""
        rounds = self.share * tokens / PER_PART / statistics.fmean(self.machines)
        return round(rounds) * EVERY


def scenarios(most: int) -> list[Scenario]:
    """Return the scenarios for a pool of at most so many machines."""
    half = most // 2
    return [
        Scenario("constant", (half,)),
        Scenario("constant_less", (half,), share=0.8),
        Scenario("constant_other_seed", (half,), seed=8),
        Scenario("constant_most", (most,)),
        Scenario("ramp_up", tuple(range(1, most + 1))),
        Scenario("ramp_down", tuple(range(most, 0, -1))),
        Scenario("jumps", (most, half, most, 1, most)),
    ]


class Pool:
    """The machines of a scenario, kept at the number that is wanted."""

    def __init__(self, cluster: Cluster) -> None:
        """Start with none."""
        self._cluster = cluster
        self._here: list[str] = []
        self.changes = 0

    def set(self, count: int) -> None:
        """Start agents, or ask the newest to leave, until there are so many."""
        while len(self._here) < count:
            name = f"n{len(self._here)}"
            old = self._cluster.nodes.get(name)
            if old is not None:
                old.wait()  # its identity lies in a folder that only one may use
                if old.stdout is not None:
                    old.stdout.close()
            self._cluster.start_node(name)
            self._here.append(name)
            self.changes += 1
        while len(self._here) > count:
            self._cluster.nodes[self._here.pop()].terminate()
            self.changes += 1


class Progress:
    """How far a job has come, from the hub's record of rounds."""

    def __init__(self, cluster: Cluster, job: str) -> None:
        """Begin at the first round."""
        self._cluster, self._job = cluster, job
        self._epoch = 0
        self.contributors: dict[int, int] = {}
        """By round."""

    def refresh(self) -> int:
        """Read what is new; return the committed tokens."""
        with contextlib.suppress(AtollError):
            page = self._cluster.client.rounds(self._job, after=self._epoch)
            self._epoch = int(page["last"])
            for row in page["rounds"]:
                if row["committed"]:
                    self.contributors[int(row["round"])] = len(row["contributors"])
        return self.tokens()

    def tokens(self, *, before: int | None = None) -> int:
        """Return the tokens of all rounds, or of those before one; round 0 trained nothing."""
        parts = sum(
            count
            for round_, count in self.contributors.items()
            if round_ > 0 and (before is None or round_ < before)
        )
        return parts * PER_PART


def run(folder: Path, scenario: Scenario, *, tokens: int, limit_s: float) -> dict[str, Any]:
    """Run one scenario to its end; return its figures."""
    folder.mkdir()
    text, steps = write_text(folder), scenario.steps(tokens)
    with Cluster(folder / "cluster") as cluster:
        cluster.start_hub()
        pool = Pool(cluster)
        pool.set(scenario.wanted(0.0))
        cluster.wait_for_nodes(scenario.wanted(0.0))
        spec = SPEC.format(
            name=scenario.name.replace("_", "-"), most=max(scenario.machines), text=text,
            seed=scenario.seed, context=CONTEXT, steps=steps, batch=BATCH, every=EVERY,
            evaluate_rounds=EVALUATE_ROUNDS, evaluate_tokens=EVALUATE_TOKENS,
        )  # fmt: skip
        job = cluster.client.submit(spec)
        progress, began = Progress(cluster, job), time.monotonic()
        while not (view := cluster.client.job(job))["ended"]:
            if time.monotonic() > began + limit_s:
                break
            progress.refresh()
            pool.set(scenario.wanted(len(progress.contributors) * EVERY / steps))
            time.sleep(POLL_S)
        seconds = time.monotonic() - began
        progress.refresh()
        curve = losses(cluster.lines(job, "metrics.jsonl"), progress)
        events = [event["kind"] for event in cluster.lines(job, "events.jsonl")]
        if view["state"] != "done":
            for event in cluster.lines(job, "events.jsonl")[-30:]:
                sys.stderr.write(f"{event['time']:.2f} {event['kind']}: {event['text']}\n")
    counts = [count for round_, count in progress.contributors.items() if round_ > 0]
    results = [member["result"] for member in view["members"] if member["result"]]
    return {
        "scenario": scenario.name,
        "machines": list(scenario.machines),
        "mean_machines": round(statistics.fmean(counts), 2) if counts else 0.0,
        "state": view["state"],
        "loss": next((r["loss_final"] for r in results if "loss_final" in r), None),
        "identical": identical(results),
        "tokens": progress.tokens(),
        "rounds": len(counts),
        "aborted": int(view["aborted_rounds"]),
        "changes": pool.changes,
        "seconds": round(seconds, 1),
        "rewound": sum("rewound" in kind for kind in events),
        "curve": [[at, round(loss, 4)] for at, loss in curve],
    }


def identical(results: Sequence[dict[str, Any]]) -> bool:
    """Return whether all members that came to the end have the same parameters."""
    last = max((int(result.get("rounds", 0)) for result in results), default=0)
    found = {str(r.get("digest")) for r in results if int(r.get("rounds", 0)) == last}
    return len(found) == 1 and "None" not in found


def losses(points: Sequence[dict[str, Any]], progress: Progress) -> list[tuple[int, float]]:
    """Return (committed tokens, held-out loss) of every evaluation with all members."""
    sums: dict[int, list[float]] = {}
    for point in points:
        values = point["values"]
        if values.get("held_out_tokens"):
            both = sums.setdefault(int(point["round"]), [0.0, 0.0])
            both[0] += values["held_out_loss_sum"]
            both[1] += values["held_out_tokens"]
    whole = max((tokens for _, tokens in sums.values()), default=0.0)
    return [
        (progress.tokens(before=round_), loss / tokens)
        for round_, (loss, tokens) in sorted(sums.items())
        if tokens > 0.95 * whole
    ]


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the noise, how far each elastic pool is off, and whether the pools agree."""
    by_name = {row["scenario"]: row for row in rows}
    if any(row["loss"] is None for row in rows):
        return {"noise": None, "agree": False, "above": None}
    whole, less = by_name["constant"], by_name["constant_less"]
    slope = (whole["loss"] - less["loss"]) / math.log(whole["tokens"] / less["tokens"])
    noise = max(LEAST_NOISE, 2 * abs(whole["loss"] - by_name["constant_other_seed"]["loss"]))
    wider = max(0.0, by_name["constant_most"]["loss"] - whole["loss"])
    above: dict[str, float] = {}
    for name in ("ramp_up", "ramp_down", "jumps"):
        row = by_name[name]
        expected = whole["loss"] + slope * math.log(row["tokens"] / whole["tokens"])
        row["expected"] = round(expected, 4)
        above[name] = round(row["loss"] - expected, 4)
    return {
        "noise": round(noise, 4),
        "agree": max(above.values()) <= wider + noise,
        "above": above,
        "constant_most_above": round(by_name["constant_most"]["loss"] - whole["loss"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="up to 4 machines, fewer tokens")
    parser.add_argument("--only", default="", help="one scenario, by its name")
    given = parser.parse_args()
    most, parts = (4, 400) if given.quick else (8, 1200)
    tokens = parts * PER_PART
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for scenario in scenarios(most):
            if given.only and scenario.name != given.only:
                continue
            row = run(Path(name) / scenario.name, scenario, tokens=tokens, limit_s=parts / 2 + 60)
            rows.append(row)
            sys.stderr.write(f"{ {key: row[key] for key in row if key != 'curve'} }\n")
    result: dict[str, Any] = {"tokens": tokens, "most_machines": most}
    if not given.only:
        result |= judge(rows)
    result |= {"identical": all(row["identical"] for row in rows), "scenarios": rows}
    hidden = ("curve", "machines", "expected")
    emit(result, [{key: row[key] for key in row if key not in hidden} for row in rows])


if __name__ == "__main__":
    main()
