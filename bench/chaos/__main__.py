"""Random faults on six workers: `python -m bench.chaos --minutes 20 --seed 1`; `--quick` 75 s.

A real hub, a node agent per worker behind a line of its own (25 ms each way), a reducer, and the
built-in trainer on a tiny model. Every few seconds something drawn at random happens: a worker, the
hub, an agent or the reducer is killed, a worker, an agent or the reducer is stopped for a while, a
line is reset, falls silent or becomes slow, a worker gets a preemption notice. Meanwhile one
thread puts letters into a queue of the hub and another takes them out. When the time is up,
nothing happens any more and the job ends by itself. A calm job with the same committed tokens
follows on the same machine. The last line of stdout is JSON; the exit status is 1 when a promise
was broken.

    faults             that happened, and how many of each kind
    rounds             committed; `aborted` are attempts that were not
    identical          all members that finished have the same parameters
    lost_acknowledged  letters that the hub had accepted and that never came out, or came out again
                       after the hub had accepted that they were done
    loss_gap           held-out loss at the end minus that of the calm job, nats per token
    rss_growth_mb      by how much the resident memory of hub, agent, worker or reducer grew, the
                       largest: median of the last quarter of the time minus that of the first
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.net.http.client import HubClient
from bench.chaos.faults import Faults, start_node
from bench.chaos.letters import Letters
from bench.chaos.memory import Memory
from bench.chaos.proxy import Proxy
from bench.chaos.run import (
    BATCH,
    CONTEXT,
    Outcome,
    Plan,
    nearly_done,
    submit,
    tell,
    wait,
    write_text,
)
from bench.kit.cluster import Cluster
from bench.kit.report import emit

DELAY_S = 0.025
EVERY = 20
START_S = 120.0
"""Most time for the first committed round."""

DRAIN_S = 60.0
NOISE = 0.05
"""Difference of losses that two runs with other seeds have, too."""

GROWTH_MB = 16.0
"""Growth that a soak of 20 minutes may show: figures kept per job, fragmentation."""


@dataclass(frozen=True)
class Effort:
    """How much is done."""

    chaos_s: float
    mean_s: float
    workers: int
    probe_steps: int
    """Steps of the calm run that measures how quick this machine is."""
    quiet_s: float
    """Most time without a committed round, when there are no more faults."""


@contextlib.contextmanager
def running(folder: Path, workers: int) -> Iterator[tuple[Cluster, dict[str, Proxy]]]:
    """Run a hub and its nodes, each behind a proxy."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(folder))
        cluster.start_hub()
        proxies = {}
        for name in (f"n{number}" for number in range(workers)):
            proxies[name] = stack.enter_context(Proxy(cluster.port, delay_s=DELAY_S))
            start_node(cluster, name, proxies[name])
        cluster.wait_for_nodes(workers)
        stack.callback(cluster.close)  # first, so that no line ends in the middle of something
        yield cluster, proxies


def calm_rate(cluster: Cluster, plan: Plan, text: Path) -> float:
    """Return the steps per second of a calm job, its start not counted."""
    job = submit(cluster, plan, text)
    wait_for_round(cluster, job, 1)
    began = time.monotonic()
    outcome = wait(cluster, job, quiet_s=START_S)
    if outcome.state != "done":
        tell(cluster, job)
        raise SystemExit(f"the calm job ended {outcome.state}: {outcome.reason}")
    return (plan.steps - plan.every) / (time.monotonic() - began)


def wait_for_round(cluster: Cluster, job: str, round_: int) -> None:
    """Wait until so many rounds are committed, or the job is over."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        view = cluster.client.job(job)
        if view["committed_round"] >= round_ or view["ended"]:
            return
        time.sleep(0.2)


def soak(
    folder: Path, effort: Effort, *, seed: int, route: str, merciless: bool
) -> tuple[Outcome, dict[str, Any]]:
    """Run a job under faults; return how it ended and what was seen meanwhile."""
    text = write_text(folder)
    with running(folder / "cluster", effort.workers) as (cluster, proxies):
        probe = Plan("probe", effort.probe_steps, effort.workers, route, EVERY)
        rate = calm_rate(cluster, probe, text)
        # More than can be done in that time: what is left when it is up is done in peace.
        steps = round(rate * effort.chaos_s * 1.25 / EVERY) * EVERY
        job = submit(cluster, Plan("chaos", steps, effort.workers, route, EVERY), text)
        wait_for_round(cluster, job, 1)
        sys.stderr.write(f"{steps} steps, {effort.chaos_s:.0f} s of faults\n")
        faults = Faults(
            cluster, proxies, job=job, seed=seed, mean_s=effort.mean_s, merciless=merciless
        )
        token = cluster.token

        def client(timeout_s: float) -> HubClient:
            return HubClient(cluster.url, token, timeout_s=timeout_s)

        with Memory(cluster) as memory, Letters(client) as letters:
            began = time.monotonic()
            faults.run(
                deadline=began + effort.chaos_s, ended=nearly_done(cluster, job, steps=steps)
            )
            seconds = time.monotonic() - began
            letters.stop_sending()
            outcome = wait(cluster, job, quiet_s=effort.quiet_s)
            letters.wait_until_read(timeout_s=DRAIN_S)
        growth = memory.growth_mb()
        if outcome.state != "done" or not outcome.identical:
            tell(cluster, job)
        return outcome, {
            "faults": sum(faults.done.values()),
            "kinds": dict(sorted(faults.done.items())),
            "chaos_s": round(seconds, 1),
            "lost_acknowledged": letters.lost,
            "letters": len(letters.accepted),
            "letters_done": len(letters.done),
            "rss_growth_mb": max(growth.values(), default=None),
            "rss_growth_by_role_mb": growth,
            "rss_largest_mb": memory.largest_mb(),
        }


def calm(folder: Path, effort: Effort, *, tokens: float, route: str) -> Outcome:
    """Run a job with as many committed tokens and no faults; return how it ended."""
    text = write_text(folder)
    per_step = effort.workers * BATCH * CONTEXT
    steps = max(EVERY, round(tokens / per_step / EVERY) * EVERY)
    with running(folder / "calm", effort.workers) as (cluster, proxies):
        for proxy in proxies.values():
            proxy.delay_s = 0.0
        job = submit(cluster, Plan("calm", steps, effort.workers, route, EVERY, "equal"), text)
        outcome = wait(cluster, job, quiet_s=START_S)
        if outcome.state != "done":
            tell(cluster, job)
        return outcome


def judge(chaos: Outcome, quiet: Outcome, seen: dict[str, Any], *, long: bool) -> dict[str, Any]:
    """Return the JSON object."""
    gap = None
    if chaos.loss is not None and quiet.loss is not None:
        gap = round(chaos.loss - quiet.loss, 4)
    broken = [
        text
        for wrong, text in (
            (chaos.state != "done", f"the job ended {chaos.state}: {chaos.reason}"),
            (not chaos.identical, "replicas differ"),
            (bool(seen["lost_acknowledged"]), "acknowledged letters were lost"),
            (gap is None or gap > NOISE, f"loss gap {gap}"),
            (long and (seen["rss_growth_mb"] or 0.0) > GROWTH_MB, "memory grew"),
        )
        if wrong
    ]
    return {
        "faults": seen["faults"],
        "rounds": chaos.rounds,
        "identical": chaos.identical,
        "lost_acknowledged": seen["lost_acknowledged"],
        "loss_gap": gap,
        "rss_growth_mb": seen["rss_growth_mb"],
        "ok": not broken,
        "broken": broken,
        "state": chaos.state,
        "aborted": chaos.aborted,
        "steps": chaos.steps,
        "committed_tokens": round(chaos.tokens),
        "finished_members": chaos.finished_members,
        "loss": chaos.loss,
        "calm_loss": quiet.loss,
        "calm_tokens": round(quiet.tokens),
        "calm_steps": quiet.steps,
        **{key: value for key, value in seen.items() if key not in ("faults", "rss_growth_mb")},
        "events": dict(sorted(chaos.events.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the faults")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--mean", type=float, default=4.0, help="mean seconds between two faults")
    parser.add_argument("--route", default="relay", help="auto, direct or relay")
    parser.add_argument(
        "--merciless", action="store_true", help="kill even the last one that has the state"
    )
    parser.add_argument("--folder", type=Path, default=None, help="keep everything here")
    parser.add_argument("--quick", action="store_true", help="35 s of faults on 4 workers")
    given = parser.parse_args()
    effort = (
        Effort(chaos_s=35.0, mean_s=2.5, workers=4, probe_steps=100, quiet_s=START_S)
        if given.quick
        else Effort(
            chaos_s=given.minutes * 60, mean_s=given.mean, workers=given.workers,
            probe_steps=400, quiet_s=START_S,
        )
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        chaos, seen = soak(
            folder, effort, seed=given.seed, route=given.route, merciless=given.merciless
        )
        quiet = calm(folder, effort, tokens=chaos.tokens, route=given.route)
    result = judge(chaos, quiet, seen, long=not given.quick)
    shown = ("faults", "rounds", "identical", "lost_acknowledged", "loss_gap", "rss_growth_mb")
    emit(result, [{"figure": name, "value": str(result[name])} for name in shown])
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
