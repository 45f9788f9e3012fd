"""Actors try things out, one learner learns from all of them: a queue and a topic.

Alone:                        python examples/actors.py
On this machine, three nodes: atoll run examples/actors.py --local 3

The first member learns; every other one acts. Actors put what they tried into the queue
`experience`, each item a dict of tensors. When the learner is slower than they are, the queue is
full and they wait. What the learner knows it publishes in the topic `weights`, where each actor
reads the newest. The task is small, so that the plumbing is seen: find the numbers in `TARGET` from
noisy rewards.
"""

from __future__ import annotations

import argparse
import threading

import torch

import atoll

TARGET = torch.tensor([0.3, -1.2, 0.8])
TRIES = 64
NOISE = 0.5


def act(run: atoll.Run) -> None:
    """Try things near what the learner knows, until it says that it knows enough."""
    experience = run.queue("experience", max_items=32, overflow="wait")
    weights = run.topic("weights", max_items=10).subscribe(f"actor {run.member}", start="oldest")
    mean, random = torch.zeros(3), torch.Generator().manual_seed(run.seed + run.slot)
    while not run.stopping:
        newest = weights.newest()
        if newest is not None:
            known = newest.value
            if bool(known["enough"]):
                return
            mean = known["mean"]
        tried = mean + NOISE * torch.randn(TRIES, 3, generator=random)
        reward = -((tried - TARGET) ** 2).sum(1)
        experience.put({"tried": tried, "reward": reward})


def learn(run: atoll.Run, *, updates: int) -> None:
    """Move towards what was rewarded; tell everybody what is known."""
    experience = run.queue("experience", max_items=32, overflow="wait")
    weights = run.topic("weights", max_items=10)
    mean, done = torch.zeros(3), 0
    for item in experience:
        with item:  # acknowledged at the end of this block, or given back if it fails
            found = item.value
            share = torch.softmax(4 * found["reward"], 0)
            mean = 0.9 * mean + 0.1 * (share[:, None] * found["tried"]).sum(0)
        done += 1
        enough = done >= updates
        weights.publish({"mean": mean, "enough": torch.tensor(enough)})
        if enough:
            break
    while rest := experience.claim(32, wait_s=1.0):  # lets actors go that wait for room
        experience.ack(rest)
    distance = float((mean - TARGET).norm())
    print(f"learned from {done} items of the queue, {distance:.2f} from the target")


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn from what actors try.")
    parser.add_argument("--updates", type=int, default=100)
    updates = parser.parse_args().updates
    with atoll.join() as run:
        if run.num_slots == 1:  # alone: act beside learning
            actor = threading.Thread(target=act, args=(run,))
            actor.start()
            learn(run, updates=updates)
            actor.join()
        elif run.slot == 0:
            learn(run, updates=updates)
        else:
            act(run)


if __name__ == "__main__":
    main()
