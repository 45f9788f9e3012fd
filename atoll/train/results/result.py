"""What a member reports when it ends: its part of the summary, or its error."""

from __future__ import annotations

import logging
import platform
import traceback
from pathlib import Path
from typing import Any

import torch

from atoll import __version__
from atoll.data import Dataset, ImageDataset
from atoll.errors import AtollError, HubError
from atoll.strategies.vectors.whole_state import report
from atoll.task import Task
from atoll.train.build import Built
from atoll.train.evaluate import Evaluation, LossOfBatch, evaluate
from atoll.train.join_job import JoinedJob
from atoll.train.results.metrics import Totals
from atoll.train.results.sample import SAMPLE_PROMPT, SAMPLE_TOKENS, write_text
from atoll.train.results.script_errors import describe
from atoll.wire.messages import Finished


def final_evaluation(
    built: Built, *, seed: int, loss_of: LossOfBatch | None = None
) -> dict[str, Any]:
    """Evaluate on all held-out data; a language model also writes a sample.

    `loss_of` uses several ranks; a classifier needs its accuracy, so `built.model` is used.
    """
    if isinstance(built.dataset, ImageDataset):
        loss_of = None
    found = evaluate(built.model, built.held_out, loss_of=loss_of)
    look: dict[str, Any] = {"loss_final": found.loss}
    if found.accuracy is not None:
        look["accuracy"] = found.accuracy
    if isinstance(built.dataset, Dataset):
        look["bytes_per_token"] = built.dataset.held_out.bytes_per_token
        if callable(getattr(built.model, "generate", None)):  # a user's model may lack it
            look["sample"] = write_text(
                built.model, built.dataset.tokenizer, SAMPLE_PROMPT, tokens=SAMPLE_TOKENS, seed=seed
            )
    return look


def member_result(
    built: Built,
    totals: Totals,
    *,
    slot: int,
    seed: int,
    start_s: float,
    first: Evaluation,
    reason: str,
) -> dict[str, Any]:
    """Return one member's part of the summary; `reason` says why it ended early, if it did."""
    task = built.task
    return {
        **run_result(member=task.member, slot=slot, seed=seed, reason=reason, totals=totals),
        **trained(task, totals=totals),
        **report(task),
        "start_s": start_s,
        "first_loss_sum": first.loss_sum,
        "first_tokens": first.tokens,
        "data_digest": built.dataset.digest,
    }


def versions() -> dict[str, str]:
    """Return the versions needed to reproduce the run."""
    return {
        "atoll": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def as_atoll_error(error: BaseException) -> AtollError:
    """Return the error that is reported to the hub when a script raised `error`."""
    if isinstance(error, AtollError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    return describe(error, where=Path(frames[0].filename).name if frames else "the script")


log = logging.getLogger(__name__)


def end_member(enrolled: JoinedJob, *, error: BaseException | None, result: dict[str, Any]) -> None:
    """Report to the hub how a member has ended, and close its session.

    `error` is the error that its program raised; None after success.

    Raises:
        HubError: the report failed, and the program itself did not.
    """
    sent = enrolled.connection.link.counters.sent_control_bytes
    error_fields = None if error is None else as_atoll_error(error).to_dict()
    words = Finished(
        ok=error is None, result=result | {"control_sent_bytes": sent}, error=error_fields
    )
    try:
        enrolled.close(words)
    except HubError as trouble:
        if error is None:
            raise
        log.warning("could not report the end of this process to the hub: %s", trouble)


def run_result(*, member: str, slot: int, seed: int, reason: str, totals: Totals) -> dict[str, Any]:
    """Return a member's part of the summary, without the model's figures."""
    return {
        "member": member,
        "slot": slot,
        **totals.to_dict(),
        "stopped": bool(reason),
        "reason": reason,
        "seed": seed,
        "versions": versions(),
    }


def trained(task: Task, *, totals: Totals) -> dict[str, Any]:
    """Return the figures of the trained model."""
    return {
        "steps": task.step,
        "tokens": task.tokens,
        "rounds": task.round,
        "parameters": task.num_parameters,
        "digests": task.past,
        "tokens_per_s": task.tokens / totals.wall_s if totals.wall_s > 0 else 0.0,
    }
