"""One job on a cluster, and what can be said of it when it is over."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.errors import AtollError
from bench.kit.cluster import Cluster

BATCH, CONTEXT = 8, 32
SPEC = """
[job]
name = "{name}"
nodes = {{min = 1, max = {workers}}}
route = "{route}"
[model]
layers = 1
width = 32
heads = 2
context = {context}
[data]
corpus = "files:{text}"
[train]
steps = {steps}
batch = {batch}
lr = 4e-3
warmup = 20
eval_tokens = 4096
pace = "{pace}"
[strategy]
preset = "diloco"
codec = "fp32"
every = {every}
shared_steps = 0
[checkpoint]
every = 20
"""
NEARLY = 0.95
"""Share of the steps after which faults end, so that the job does."""

ENDS = ("done", "failed", "stopped")


@dataclass(frozen=True)
class Plan:
    """What a job is asked to do."""

    name: str
    steps: int
    workers: int
    route: str
    every: int
    pace: str = "measured"
    """`equal` where the number of tokens has to follow from that of steps."""


@dataclass
class Outcome:
    """How a job ended."""

    state: str
    reason: str = ""
    rounds: int = 0
    aborted: int = 0
    steps: int = 0
    tokens: float = 0.0
    """In committed rounds, all members together."""
    loss: float | None = None
    identical: bool = False
    finished_members: int = 0
    seconds: float = 0.0
    events: dict[str, int] = field(default_factory=dict)


def write_text(folder: Path) -> Path:
    """Write a text that a small model can learn something of, always the same one."""
    words = random.Random(5)
    known = ["".join(words.choices("abcdefghijklmnop", k=words.randint(2, 7))) for _ in range(300)]
    chain = {word: words.choices(known, k=6) for word in known}
    word, parts = known[0], []
    for _ in range(80_000):
        parts.append(word)
        word = words.choice(chain[word])
    path = folder / "text.txt"
    path.write_text(" ".join(parts), encoding="utf-8")
    return path


def submit(cluster: Cluster, plan: Plan, text: Path) -> str:
    """Submit a job and return its id."""
    spec = SPEC.format(
        name=plan.name, workers=plan.workers, route=plan.route, context=CONTEXT, text=text,
        steps=plan.steps, batch=BATCH, every=plan.every, pace=plan.pace,
    )  # fmt: skip
    return cluster.client.submit(spec)


def ask(cluster: Cluster, job: str) -> dict[str, Any] | None:
    """Return the job as the hub shows it, or None while the hub does not answer."""
    try:
        return cluster.client.job(job)
    except AtollError:
        return None


def ended(cluster: Cluster, job: str, *, look_every_s: float = 1.0) -> Callable[[], bool]:
    """Return a check whether a job is over, which asks the hub about once a second."""
    looked, over = 0.0, False

    def check() -> bool:
        nonlocal looked, over
        if not over and time.monotonic() - looked >= look_every_s:
            looked = time.monotonic()
            view = ask(cluster, job)
            over = view is not None and view["state"] in ENDS
        return over

    return check


def nearly_done(cluster: Cluster, job: str, *, steps: int) -> Callable[[], bool]:
    """Return a check whether a job has done most of its steps; it looks every five seconds."""
    looked, done = 0.0, False

    def check() -> bool:
        nonlocal looked, done
        if not done and time.monotonic() - looked >= 5.0:
            looked = time.monotonic()
            view = ask(cluster, job)
            done = view is not None and view["progress"]["step"] > NEARLY * steps
        return done

    return check


def wait(cluster: Cluster, job: str, *, quiet_s: float) -> Outcome:
    """Wait for a job's end and return how it was.

    It is "late" only when no round is committed for so long: a busy machine needs more time for
    the same steps.
    """
    over, moved, seen = ended(cluster, job), time.monotonic(), -1
    while not over() and time.monotonic() - moved < quiet_s:
        view = ask(cluster, job)
        if view is not None and view["committed_round"] != seen:
            moved, seen = time.monotonic(), view["committed_round"]
        time.sleep(0.5)
    return look(cluster, job)


def look(cluster: Cluster, job: str) -> Outcome:
    """Return how a job stands, from the hub's answers and its files."""
    view = ask(cluster, job)
    if view is None:
        return Outcome("unknown", "the hub does not answer")
    results = {m["member"]: m["result"] for m in view["members"] if m["result"]}
    done = {name: result for name, result in results.items() if not result.get("stopped")}
    digests = {str(result.get("digest")) for result in done.values()}
    losses = [result["loss_final"] for result in done.values() if "loss_final" in result]
    kinds: dict[str, int] = {}
    for event in cluster.lines(job, "events.jsonl"):
        kinds[event["kind"]] = kinds.get(event["kind"], 0) + 1
    return Outcome(
        state=view["state"] if view["state"] in ENDS else "late",
        reason=view["reason"] or str(view["error"] or ""),
        rounds=int(view["committed_round"]),
        aborted=int(view["aborted_rounds"]),
        steps=max((int(result["steps"]) for result in done.values()), default=0),
        tokens=committed_tokens(cluster, job),
        loss=losses[0] if losses else None,
        identical=len(digests) == 1 and "None" not in digests,
        finished_members=len(done),
        seconds=(view["ended"] or time.time()) - (view["started"] or time.time()),
        events=kinds,
    )


def committed_tokens(cluster: Cluster, job: str) -> float:
    """Return the tokens behind all committed rounds.

    The hub knows who took part in each; what a part weighs, members tell about once a second.
    """
    known = [
        float(point["values"]["weight"]) / float(point["values"]["contributors"])
        for point in cluster.lines(job, "metrics.jsonl")
        if point["values"].get("contributors")
    ]
    parts: dict[int, int] = {}
    after = 0
    while rows := (page := cluster.client.rounds(job, after=after))["rounds"]:
        # A run that was set back does rounds again: the later ones count.
        parts |= {int(row["round"]): len(row["contributors"]) for row in rows if row["committed"]}
        after = int(page["last"])
    return sum(parts.values()) * statistics.fmean(known) if known else 0.0


def tell(cluster: Cluster, job: str, *, lines: int = 40) -> None:
    """Write the last events and printed lines of a job to stderr, for a search for faults."""
    for event in cluster.lines(job, "events.jsonl")[-lines:]:
        sys.stderr.write(f"{event['time']:.2f} {event['kind']}: {event['text']}\n")
    try:
        printed = cluster.client.logs(job, tail=lines)["lines"]
    except AtollError:
        return
    for line in printed:
        sys.stderr.write(f"{line['member']} {line['text']}\n")
