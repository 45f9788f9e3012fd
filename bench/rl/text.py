"""What language models learn by rewards, and by whose values: `python -m bench.rl.text`.

The job is examples/brackets.toml, all of it in one process with fixed seeds and one thread: the
same start, then PPO with one value model for both policies, PPO with one for each, and GRPO with
none. Every run is kept in a file as soon as it ends, so that the command can be started again.
Scores are means over 256 prompts that are in no batch, sampled as in training.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from atoll.config import JobSpec, load_spec
from atoll.rl.text.in_process import TextInProcessRun
from atoll.rl.text.start import StartModel, start_model, train_start_model

JOB = Path(__file__).parents[2] / "examples" / "brackets.toml"
VARIANTS: dict[str, dict[str, str]] = {
    "pooled": {"critic": "pooled"}, "own": {"critic": "own"}, "grpo": {"algorithm": "grpo"},
    "unconditioned": {"critic": "unconditioned"},
}  # fmt: skip
EXAMINED = 256
LAST = 5
"""Updates whose mean is what a run ends with."""

AIM = 0.9
"""Mean reward whose first reaching is noted."""


def main() -> None:
    """Measure what is not in the file yet; the last line is all of it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 11])
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["pooled", "own", "grpo"]
    )
    parser.add_argument("--episodes", type=int, default=6400, help="completions of each policy")
    parser.add_argument("--to", type=Path, default=Path("rl_text.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    done: dict[str, Any] = (
        json.loads(args.to.read_text(encoding="utf-8")) if args.to.exists() else {}
    )
    for seed in args.seeds:
        spec = load_spec(JOB)
        spec = dataclasses.replace(spec, job=dataclasses.replace(spec.job, seed=seed))
        names = [f"{variant} {seed} {args.episodes}" for variant in args.variants]
        if all(name in done for name in names):
            continue
        began = time.process_time()
        beginning = start_model(spec)
        loss = train_start_model(beginning, spec)
        taught = {"loss": loss, "cpu_s": time.process_time() - began}
        for name, variant in zip(names, args.variants, strict=True):
            if name not in done:
                done[name] = {
                    "examples": taught,
                    **measure(spec, beginning, variant, args.episodes),
                }
                args.to.write_text(json.dumps(done), encoding="utf-8")
                print(name, json.dumps({k: v for k, v in done[name].items() if k != "policies"}))
                for policy, facts in done[name]["policies"].items():
                    print(" ", policy, {k: v for k, v in facts.items() if k != "curve"})
    print(json.dumps(done))


def measure(spec: JobSpec, beginning: StartModel, variant: str, episodes: int) -> dict[str, Any]:
    """Return how one run went."""
    rl = dataclasses.replace(spec.rl, steps=episodes, **VARIANTS[variant])  # type: ignore[arg-type]
    together = TextInProcessRun(dataclasses.replace(spec, rl=rl), copy.deepcopy(beginning))
    names = [policy.name for policy in together.policies]
    updates_of: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    before = {p.name: _scores(p) for p in together.policies}
    began, updates = time.process_time(), 0
    while not together.done:
        together.update(on_update=lambda policy, facts: updates_of[policy].append(facts))
        updates += 1
    cpu_s = time.process_time() - began
    policies = {}
    for policy in together.policies:
        seen = updates_of[policy.name]
        curve = [round(facts["return"], 4) for facts in seen]
        last: dict[str, float] = {
            name: sum(facts[name] for facts in seen[-LAST:]) / LAST
            for name in ("kl_reference", "length", "entropy", "explained_variance")
            if name in seen[-1]
        }
        policies[policy.name] = {
            "before": before[policy.name], "after": _scores(policy), **last,
            "completions_to_aim": _reached(curve, episodes // len(curve)), "curve": curve,
        }  # fmt: skip
    return {"cpu_s": cpu_s, "updates": updates, "policies": policies}


def _scores(policy: Any) -> dict[str, float]:
    sampled, _ = policy.examine(EXAMINED, temperature=1.0)
    likeliest, _ = policy.examine(EXAMINED, temperature=0.0)
    return {"sampled": sampled, "likeliest": likeliest}


def _reached(curve: list[float], each: int) -> int | None:
    """Return after how many completions the mean of the last updates was at the aim."""
    for end in range(LAST, len(curve) + 1):
        if sum(curve[end - LAST : end]) / LAST >= AIM:
            return end * each
    return None


if __name__ == "__main__":
    main()
