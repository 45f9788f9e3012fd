"""Machines that come and go by plan: `python -m bench.pool [--quick]`, one JSON object on stdout.

Adaptive compute pools as in DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105, figure
on the adaptive compute pool): the same small GPT with the same seed on a constant number of
machines, on a growing, a shrinking and a jumping one. Real hub, real node agents: a machine comes
when its agent is started and goes when its agent is asked to leave. Each scenario ends at the same
number of committed tokens; stretches of a scenario have equal numbers of rounds.

    loss        held-out, nats per token, of the common parameters at that many tokens: the mean of
                the evaluations in the last tenth
    curve       (committed tokens, held-out loss) of every evaluation
    identical   all members that were there at the end have the same parameters
    noise       how far two constant pools with different seeds are apart, doubled, at least 0.02
    agree       no elastic pool is outside what the constant ones span by more than noise, and the
                growing and the shrinking one are no further apart than that
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
from bench.cluster import Cluster
from bench.report import emit

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
warmup = 20
schedule = "constant"
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
    """How many machines there are, in stretches of equally many rounds."""

    name: str
    machines: tuple[int, ...]
    seed: int = 7

    def wanted(self, share: float) -> int:
        """Return how many machines there should be when a share of the tokens is done."""
        sums = list(itertools.accumulate(self.machines))
        for count, until in zip(self.machines, sums, strict=True):
            if share < until / sums[-1]:
                return count
        return self.machines[-1]


def scenarios(most: int) -> list[Scenario]:
    """Return the scenarios for a pool of at most so many machines."""
    half = most // 2
    return [
        Scenario(f"constant_{half}", (half,)),
        Scenario(f"constant_{half}_other_seed", (half,), seed=8),
        Scenario(f"constant_{most}", (most,)),
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
    """Run one scenario to so many committed tokens; return its figures."""
    folder.mkdir()
    text, most = write_text(folder), max(scenario.machines)
    with Cluster(folder / "cluster") as cluster:
        cluster.start_hub()
        pool = Pool(cluster)
        pool.set(scenario.wanted(0.0))
        cluster.wait_for_nodes(scenario.wanted(0.0))
        spec = SPEC.format(
            name=scenario.name.replace("_", "-"), most=most, seed=scenario.seed, text=text,
            context=CONTEXT, steps=10 * tokens // (BATCH * CONTEXT), batch=BATCH, every=EVERY,
            evaluate_rounds=EVALUATE_ROUNDS, evaluate_tokens=EVALUATE_TOKENS,
        )  # fmt: skip
        job = cluster.client.submit(spec)
        progress, began = Progress(cluster, job), time.monotonic()
        while (done := progress.refresh()) < tokens and time.monotonic() < began + limit_s:
            if cluster.client.job(job)["ended"]:
                break
            pool.set(scenario.wanted(done / tokens))
            time.sleep(POLL_S)
        seconds = time.monotonic() - began
        cluster.client.stop(job, grace_s=30.0)
        view = _ended(cluster, job)
        progress.refresh()
        curve = losses(cluster.lines(job, "metrics.jsonl"), progress)
        events = [event["kind"] for event in cluster.lines(job, "events.jsonl")]
        if progress.tokens() < tokens:
            for event in cluster.lines(job, "events.jsonl")[-30:]:
                sys.stderr.write(f"{event['time']:.2f} {event['kind']}: {event['text']}\n")
    counts = [count for round_, count in progress.contributors.items() if round_ > 0]
    return {
        "scenario": scenario.name,
        "machines": list(scenario.machines),
        "mean_machines": round(statistics.fmean(counts), 2) if counts else 0.0,
        "loss": final_loss(curve, tokens),
        "identical": identical(view),
        "tokens": progress.tokens(),
        "complete": progress.tokens() >= tokens,
        "rounds": len(counts),
        "aborted": int(view["aborted_rounds"]),
        "changes": pool.changes,
        "seconds": round(seconds, 1),
        "rewound": sum("rewound" in kind for kind in events),
        "curve": [[at, round(loss, 4)] for at, loss in curve],
    }


def _ended(cluster: Cluster, job: str) -> dict[str, Any]:
    """Wait for the end of a job that was asked to stop; return its view."""
    deadline = time.monotonic() + 60.0
    while not (view := cluster.client.job(job))["ended"] and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return view


def identical(view: dict[str, Any]) -> bool:
    """Return whether all members that came to the end have the same parameters."""
    results = [member["result"] for member in view["members"] if member["result"]]
    last = max((int(result.get("rounds", 0)) for result in results), default=0)
    found = {str(r.get("digest")) for r in results if int(r.get("rounds", 0)) == last}
    return len(found) == 1 and "None" not in found


def losses(points: Sequence[dict[str, Any]], progress: Progress) -> list[tuple[int, float]]:
    """Return (committed tokens, held-out loss) of every evaluation that nobody is missing from."""
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


def final_loss(curve: Sequence[tuple[int, float]], tokens: int) -> float | None:
    """Return the mean loss between nine tenths of the tokens and all of them."""
    late = [loss for at, loss in curve if 0.9 * tokens <= at <= 1.02 * tokens]
    return round(statistics.fmean(late), 4) if late else None


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the noise, the gaps and whether the pools agree."""
    by_name = {row["scenario"]: row["loss"] for row in rows}
    constant = [loss for name, loss in by_name.items() if name.startswith("constant")]
    elastic = [by_name[name] for name in ("ramp_up", "ramp_down", "jumps")]
    if None in constant or None in elastic:
        return {"noise": None, "agree": False, "outside": None, "up_against_down": None}
    noise = max(LEAST_NOISE, 2 * abs(constant[0] - constant[1]))
    outside = max(max(loss - max(constant), min(constant) - loss, 0.0) for loss in elastic)
    between = abs(by_name["ramp_up"] - by_name["ramp_down"])
    return {
        "noise": round(noise, 4),
        "agree": max(outside, between) <= noise,
        "outside": round(outside, 4),
        "up_against_down": round(between, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="up to 4 machines, fewer tokens")
    parser.add_argument("--only", default="", help="one scenario, by its name")
    given = parser.parse_args()
    most, parts = (4, 400) if given.quick else (8, 2400)
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
    hidden = ("curve", "machines")
    emit(result, [{key: row[key] for key in row if key not in hidden} for row in rows])


if __name__ == "__main__":
    main()
