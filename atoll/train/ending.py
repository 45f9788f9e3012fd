"""What a member says about its run when it ends: its part of the summary."""

from __future__ import annotations

import platform
from typing import Any

import torch

from atoll import __version__
from atoll.config import JobSpec
from atoll.data import Dataset, ImageDataset
from atoll.strategies.strategy import Outer
from atoll.train.build import Built
from atoll.train.evaluate import Evaluation, LossOfBatch, evaluate
from atoll.train.metrics import Totals
from atoll.train.sample import SAMPLE_PROMPT, SAMPLE_TOKENS, write_text


def last_look(built: Built, *, seed: int, loss_of: LossOfBatch | None = None) -> dict[str, Any]:
    """Evaluate on all that is held out; a language model writes something, too.

    Args:
        built: What was trained; `built.model` carries the final parameters.
        seed: Of what the model writes.
        loss_of: Computes losses where many processes can, together; a classifier, whose answers
            are looked at, is evaluated by `built.model` alone.
    """
    if isinstance(built.dataset, ImageDataset):
        loss_of = None
    found = evaluate(built.model, built.held_out, loss_of=loss_of)
    look: dict[str, Any] = {"loss_final": found.loss}
    if found.accuracy is not None:
        look["accuracy"] = found.accuracy
    if isinstance(built.dataset, Dataset):
        look["bytes_per_token"] = built.dataset.held_out.bytes_per_token
        look["sample"] = write_text(
            built.model, built.dataset.tokenizer, SAMPLE_PROMPT, tokens=SAMPLE_TOKENS, seed=seed
        )
    return look


def member_result(
    spec: JobSpec,
    built: Built,
    outer: Outer,
    totals: Totals,
    *,
    slot: int,
    start_s: float,
    first: Evaluation,
    reason: str,
) -> dict[str, Any]:
    """Return one member's part of the summary; `reason` says why it ended early, if it did."""
    task = built.task
    return {
        "member": task.member,
        "slot": slot,
        "steps": task.step,
        "tokens": task.tokens,
        "rounds": task.round,
        **totals.to_dict(),
        "start_s": start_s,
        "parameters": task.num_parameters,
        "first_loss_sum": first.loss_sum,
        "first_tokens": first.tokens,
        "digests": task.past,
        "digest": outer.digest(task),
        "data_digest": built.dataset.digest,
        "tokens_per_s": task.tokens / totals.wall_s if totals.wall_s > 0 else 0.0,
        "stopped": bool(reason),
        "reason": reason,
        "seed": spec.job.seed,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return what is needed to run it again."""
    return {
        "atoll": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
