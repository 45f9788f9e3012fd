"""How long experience and values take through a hub: `python -m bench.rl.queue [--seconds S]`.

Four actors and a critic in processes of their own, and a real hub. Actors send trajectories of 8
copies of CartPole for 64 steps (made up, always the same) at a pace of 4 each second: about 8,000
environment steps per second of the whole system. The critic takes what comes, publishes the weights
of a critic for four policies after each take, and answers questions for values. Nothing learns:
these are the times of the channel alone.

    experience   from an actor's `send` to the critic's `take`
    weights      from `publish` to a reader at an actor that looks for news every 2 ms
    age          of the weights that an actor uses, which looks once per trajectory: it fetches one
                 publication for each, about half way
    values       from a question with a whole trajectory to its answer (of which compute: `compute`)
    bytes        of an actor per environment step: up (experience), down (weights, heartbeats)

Every time is taken by the clock of one machine, in milliseconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from atoll.config.rl_tables import RlTable
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.sync_link import connect
from atoll.queues import HubChannel, QueueRegistry
from atoll.rl.channel.actor import ActorChannel
from atoll.rl.channel.critic import CriticChannel
from atoll.rl.channel.latest import LatestValue
from atoll.rl.critic.critic import Critic
from atoll.rl.critic.service import ServiceValues, ValueService
from atoll.rl.environments.spaces import Actions, TaskSpec
from atoll.rl.trajectory import Trajectory
from bench.kit.hub_process import hub
from bench.kit.report import emit

ACTORS = 4
PACE_PER_S = 4.0
LOOK_S = 0.002
RL = RlTable()
PUBLISHED_AT = "published_at"


def trajectory() -> Trajectory:
    """Return one rollout of CartPole's shape."""
    steps, columns = RL.rollout, RL.environments
    none = torch.zeros(steps, columns, dtype=torch.bool)
    return Trajectory(
        policy="", observations=torch.randn(steps + 1, columns, 4),
        actions=torch.randint(0, 2, (steps, columns, 1)),
        log_probabilities=-torch.rand(steps, columns), rewards=torch.ones(steps, columns),
        terminated=none, truncated=none, cut_at=torch.zeros(0, 2, dtype=torch.int64),
        cut_observations=torch.zeros(0, 4),
    )  # fmt: skip


def spec_of(policy: str) -> TaskSpec:
    """Return the task of a policy."""
    return TaskSpec(
        policy=policy, task="cart", observation=(4,), gamma=RL.gamma,
        actions=Actions(kind="discrete", sizes=(2,)),
    )  # fmt: skip


def act(url: str, token: str, number: int, seconds: float, pipe: Any) -> None:
    """Be one actor; send what was measured."""
    torch.set_num_threads(1)
    member = f"w{number}"
    hello = make_hello(f"bench/{member}", token)
    with tempfile.TemporaryDirectory() as folder, connect(url, hello) as link:
        channel = HubChannel(link, client=lambda: HubClient(url, token), scratch=Path(folder))
        registry = QueueRegistry(channel, prefix="bench", reader=member)
        side = ActorChannel(registry, rl=RL, policy=f"p{number}", member=member)
        values = ServiceValues(registry, rl=RL, member=member)
        side.announce(spec_of(side.policy))
        weights: list[float] = []
        item, end, due = trajectory(), time.monotonic() + seconds, time.monotonic()
        watcher = LatestValue(registry.topic("values"), reader=f"{member}.watch").begin()
        ages: list[float] = []
        while time.monotonic() < end:
            if (found := watcher.take()) is not None:
                weights.append(time.time() - float(found[PUBLISHED_AT]))
            if time.monotonic() >= due:
                due += 1.0 / PACE_PER_S
                if (found := side.newest_values()) is not None:
                    ages.append(time.time() - float(found[PUBLISHED_AT]))
                side.send(item)
            time.sleep(LOOK_S)
        sent = side.sequence
        for _ in range(40):
            values.of(item)
        side.flush()
        pipe.send(
            {
                "weights": weights, "age": ages, "values": values.waited_s, "sent": sent,
                "up": side.sent_bytes / (sent * item.steps),
                "down": side.received_bytes / (sent * item.steps),
                "wait_s": side.queue_wait_s, "dropped": side.dropped,
            }
        )  # fmt: skip
        watcher.close()
        side.close()


def percentiles(times_s: list[float]) -> dict[str, float]:
    """Return median and 99th percentile in milliseconds."""
    ordered = sorted(times_s)
    at = {"p50": 0.5, "p99": 0.99}
    return {
        name: round(1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1)
        for name, q in at.items()
    }


def measure(url: str, token: str, seconds: float) -> dict[str, Any]:
    """Be the critic of four actors for so long; return the figures."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(ACTORS)]
    actors = [
        context.Process(target=act, args=(url, token, n + 1, seconds, pipes[n][1]))
        for n in range(ACTORS)
    ]
    critic = Critic(RL, seed=1)
    travelled: list[float] = []
    hello = make_hello("bench/w0", token)
    with tempfile.TemporaryDirectory() as folder, connect(url, hello) as link:
        channel = HubChannel(link, client=lambda: HubClient(url, token), scratch=Path(folder))
        registry = QueueRegistry(channel, prefix="bench", reader="w0")
        for n in range(ACTORS):
            critic.add_policy(spec_of(f"p{n + 1}"))
        answering = ValueService(registry, rl=RL, of=critic.of)
        side = CriticChannel(registry, rl=RL)
        for actor in actors:
            actor.start()
        results: list[dict[str, Any]] = []
        takes = 0
        while len(results) < ACTORS:
            got = side.take(8, wait_s=0.2)
            travelled += [one.travelled_s for one in got]
            if got:
                takes += 1
                now = torch.tensor(time.time(), dtype=torch.float64)
                side.publish({**critic.snapshot(), PUBLISHED_AT: now}, version=takes)
                if side.should_save:
                    side.settling()()
            results += [pipe.recv() for pipe, _ in pipes if pipe.poll()]
        side.close()
        answering.close()
        for actor in actors:
            actor.join()
        snapshot_bytes = sum(t.nbytes for t in critic.snapshot().values())
    steps = RL.rollout * RL.environments
    return {
        "experience": percentiles(travelled[ACTORS:]),
        "weights": percentiles([t for one in results for t in one["weights"][1:]]),
        "age": percentiles([t for one in results for t in one["age"][1:]]),
        "values": percentiles([t for one in results for t in one["values"]]),
        "compute": percentiles(answering.compute_s),
        "up_bytes_per_step": round(statistics.fmean(one["up"] for one in results), 2),
        "down_bytes_per_step": round(statistics.fmean(one["down"] for one in results), 2),
        "snapshot_bytes": snapshot_bytes,
        "trajectories": len(travelled),
        "steps_per_s": round(sum(one["sent"] for one in results) * steps / seconds),
        "takes_per_s": round(takes / seconds, 1),
        "queue_wait_s": round(sum(one["wait_s"] for one in results), 3),
        "dropped": sum(one["dropped"] for one in results) + sum(side.counts.values()),
    }


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description="latencies of the channel to the critic")
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    with hub() as (running, _):
        found = measure(running.url, running.token, seconds)
    rows = [{"figure": name, "value": str(value)} for name, value in found.items()]
    emit(found, rows)


if __name__ == "__main__":
    main()
