"""Tasks of `lm-eval` (https://github.com/EleutherAI/lm-evaluation-harness) with a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from atoll.errors import ConfigError, DataError
from atoll.export.opened import Opened

Results = dict[str, dict[str, float]]
"""By task, its measures: `acc`, `acc_norm`, `exact_match` ..., and `acc_stderr`."""


def measure_tasks(
    opened: Opened, tasks: Sequence[str], *, batch: int, device: torch.device,
    limit: int | None = None, folder: Path | None = None,
) -> Results:  # fmt: skip
    """Return the measures of tasks.

    Args:
        opened: The trained model.
        tasks: Names, as of `lm-eval ls tasks`, or of files in `folder`.
        batch: Rows computed at once.
        device: Where the model computes.
        limit: Examples of each task; None: all.
        folder: Where further tasks are described in YAML.

    Raises:
        ConfigError: `lm-eval` is not installed, or has no such task.
        DataError: the model has no tokenizer, or a task's data cannot be had.
    """
    harness, models, manager = _library()
    if opened.tokenizer is None:
        raise DataError("tasks need a tokenizer", given="a model without one")
    known = manager.TaskManager(include_path=None if folder is None else str(folder))
    strange = [name for name in tasks if not known.match_tasks([name])]
    if strange:
        raise ConfigError(
            "lm-eval has no such task", given=", ".join(strange),
            expected="a name of `lm-eval ls tasks`, or of a YAML file in --task-folder",
        )  # fmt: skip
    model = models.HFLM(
        pretrained=opened.whole().to(device), tokenizer=opened.tokenizer, batch_size=batch,
        device=str(device),
    )  # fmt: skip
    try:
        found = harness.simple_evaluate(
            model=model, tasks=list(tasks), limit=limit, task_manager=known, bootstrap_iters=0
        )
    except (OSError, ConnectionError) as error:
        raise DataError(
            "the data of a task cannot be had", given=" ".join(str(error).split())[:300],
            expected="a network, or a task with files of this machine",
        ) from error  # fmt: skip
    return {name: _figures(measures) for name, measures in found["results"].items()}


def _figures(measures: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a task by their names, without those of its filters."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in measures.items()
        if isinstance(value, int | float) and name not in ("alias", "sample_len")
    }


def _library() -> tuple[Any, Any, Any]:
    try:
        import lm_eval
        from lm_eval import tasks
        from lm_eval.models import huggingface
    except ImportError as error:
        raise ConfigError(
            "tasks need a library that is not installed", given=str(error),
            expected="lm-eval 0.4.9 or later", remedy="pip install lm-eval",
        ) from error  # fmt: skip
    return lm_eval, huggingface, tasks
