"""What recomputation keeps and costs: `python -m bench.recompute`, one JSON object on stdout.

One step of a GPT (8 layers, width 128, 8 sequences of 128 tokens) with each word of `[train]
recompute`: bytes of activations that live from the forward to the backward pass, and the floating
point operations of both. Counted, not timed: every run gives the same numbers.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from atoll.models import GPT, GPTConfig
from atoll.plan.tracking import Tracking
from atoll.strategies.inner.unit_transforms import apply_recompute
from bench.kit.report import emit

WORDS = ("none", "matmul", "every:2", "full")
ROWS, CONTEXT = 8, 128


def look(word: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=8, width=128, context=CONTEXT))
    apply_recompute(model.units(), word)
    ids = torch.randint(256, (ROWS, CONTEXT + 1))
    with FlopCounterMode(display=False) as counter:
        with Tracking(model.parameters()) as tracking:
            loss = model.loss(ids[:, :-1], ids[:, 1:])
            kept = tracking.alive_bytes
        loss.backward()  # type: ignore[no-untyped-call]
    operations = counter.get_total_flops() / 1e9
    return {"recompute": word, "kept_mib": round(kept / 2**20, 1), "gflop": round(operations, 2)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [look(word) for word in WORDS]
    emit({"rows": rows}, rows)


if __name__ == "__main__":
    main()
