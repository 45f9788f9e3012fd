"""One member of `python -m bench.rl.patches`: the trainer (slot 0) or the one that samples for it.

Both use the classes of jobs with `samplers` in `[rl]`; a script, so that rewards are written down
batch by batch, and no state of 1.6 GB is sent over the line at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import atoll
from atoll.config import JobSpec, load_spec
from atoll.config.rl_roles import MemberRole, member_roles
from atoll.rl.environments.spaces import DISCRETE, Actions, TaskSpec
from atoll.rl.text.language_policy import LanguagePolicy
from atoll.rl.text.rollouts import Collector, RolloutWorker
from atoll.rl.text.start import StartModel, start_model, train_start_model
from atoll.run import Run

EXAMINED = 256
"""Prompts of the evaluations before and after, in no batch."""


def train(
    run: Run, spec: JobSpec, role: MemberRole, beginning: StartModel, lines: Path
) -> dict[str, Any]:
    """Learn from what the other member writes; write a line for each batch; return the figures."""
    name, config = role.policy, beginning.model.config
    policy = LanguagePolicy(
        name, beginning.tasks[name], beginning.model, beginning.wording, spec.rl,
        episodes=role.steps, seed=spec.job.seed,
    )  # fmt: skip
    task = TaskSpec(
        policy=name, task=role.env, env=role.env, observation=(config.context,),
        actions=Actions(kind=DISCRETE, sizes=(config.vocab_size,)), gamma=spec.rl.gamma,
    )  # fmt: skip
    before, _ = policy.examine(EXAMINED, temperature=spec.rl.temperature)
    collector = Collector(run, policy, task=task, workers=1)
    run.track(policy.model)
    collector.publish()
    began = time.monotonic()
    with lines.open("w", encoding="utf-8") as out:
        while not policy.done and (episodes := collector.next()) is not None:
            facts = policy.improve(episodes, None)
            computed = time.monotonic()
            sent = collector.sent_bytes
            collector.learned()
            line = {
                "reward": episodes.scores.mean().item(), "kl": facts["kl_reference"],
                "length": facts["length"], "age": collector.figures["policy_age"],
                "bytes": collector.sent_bytes - sent, "received": collector.received_bytes,
                "publish_s": time.monotonic() - computed, "at_s": time.monotonic() - began,
            }  # fmt: skip
            out.write(json.dumps(line) + "\n")
            out.flush()
            run.stepped(episodes.steps)
    collector.end()
    after, texts = policy.examine(EXAMINED, temperature=spec.rl.temperature)
    return {
        "before": before, "after": after, "texts": texts[:3], "dropped": collector.dropped,
        "weights": sum(p.numel() for p in policy.model.parameters()),
    }  # fmt: skip


def main() -> None:
    """Take the role of this member's slot."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True, help="with [model] and [rl]")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = load_spec(args.job)
    with atoll.join() as run:
        role = member_roles(spec.rl)[run.slot]
        beginning = start_model(spec)
        if not beginning.trained:  # the seed makes it the same on both
            train_start_model(beginning, spec)
        if run.slot:
            RolloutWorker(spec, run, role, beginning).run()
            return
        found = train(run, spec, role, beginning, args.out.with_suffix(".jsonl"))
        args.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
