"""`data.json` of a job that is tuned: what is in its examples, and some of them, for people."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from atoll.data import ExampleSet
from atoll.data.tuning.packing import Rows

NAME = "data.json"
SHOWN = 6
"""Examples."""
PAIR, GOOD, BAD = ("Chosen", "Rejected"), "Good", "Bad"
LONGEST = 4_000
"""Characters of a part of an example."""


def publish_preview(
    data: object, folder: Path, publish: Callable[[Path, str], None] | None
) -> None:
    """Write the preview of examples and publish it; other data have none."""
    if not isinstance(data, ExampleSet) or publish is None:
        return
    path = folder / NAME
    path.write_text(json.dumps(preview_of(data)), encoding="utf-8", newline="\n")
    publish(path, NAME)


def preview_of(data: ExampleSet) -> dict[str, Any]:
    """Return `sentences` about the data, `examples`, and for each the `headings` of its answers.

    An example is a list of answers with their prompts, one or a preferred and another one. Each is
    a list of `[text, trained]`: stretches that are trained on, and those that are not.
    """
    rows = data.train
    numbers = [number for row in range(min(SHOWN, len(rows))) for number in rows.examples(row)]
    each = 2 if rows.pairs else 1
    groups = [numbers[at : at + each] for at in range(0, each * SHOWN, each)]
    groups = [group for group in groups if group]
    headings = [list(PAIR) if rows.pairs else [] for _ in groups]
    if rows.good is not None:  # the second one only measures how far the model is from its base
        headings = [[GOOD if rows.good[first // 2] else BAD] for first, _ in groups]
        groups = [[first] for first, _ in groups]
    return {
        "sentences": data.quality.sentences(),
        "headings": headings,
        "examples": [[_stretches(data, rows, one) for one in group] for group in groups],
    }


def _stretches(data: ExampleSet, rows: Rows, example: int) -> list[tuple[str, bool]]:
    ids, trained = rows.example(example)
    found, at = [], 0
    for kind, stretch in groupby(trained.tolist()):
        length = len(list(stretch))
        part = torch.from_numpy(ids[at : at + length].astype("int64"))
        text = data.tokenizer.decode(part).decode("utf-8", "replace")
        found.append((text[:LONGEST], bool(kind)))
        at += length
    return found
