"""README.md of an exported model: its base, its training and its loss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atoll.config.tables import JobSpec

_PUBLISHED = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""OWNER/NAME of a model hub; other bases are files, packages or descriptions."""


def model_card(
    name: str, *, base: str, spec: JobSpec | None, summary: Mapping[str, Any], adapter: bool
) -> str:
    """Return the text, which begins with the metadata that model hubs read.

    Args:
        name: The run.
        base: The model that the adapters belong to; empty: all weights were trained.
        spec: The job, if known.
        summary: Content of the run's summary.json; may be empty.
        adapter: Only adapters are in the folder.
    """
    lines = ["---", f"library_name: {'peft' if adapter else 'transformers'}"]
    if _PUBLISHED.fullmatch(base):
        lines += [f"base_model: {base}", f"base_model_relation: {_relation(adapter)}"]
    lines += ["pipeline_tag: text-generation", "tags: [atoll]", "---", "", f"# {name}", ""]
    kind = "Adapters for" if adapter else "A fine-tuned model from"
    lines.append(f"{kind} {base}, trained with Atoll." if base else "Trained with Atoll.")
    lines.append("")
    if spec is not None and spec.tune.active:
        tune = spec.tune
        rank = f", rank {tune.rank}, alpha {tune.alpha:g}" if tune.adapters else ""
        lines.append(f"- method: {tune.method}{rank}")
        if tune.preferences:
            lines.append(f"- objective: {tune.objective.upper()} (preferences), beta {tune.beta:g}")
    if summary:
        lines += [
            f"- {summary['steps']:,} steps on {summary['nodes']} members, "
            f"{summary['rounds_committed']} rounds, {summary['tokens']:,} tokens",
        ]
        first, final = summary.get("loss_first"), summary.get("loss_final")
        if final is not None:
            before = f"{first:.3f} before, " if first is not None else ""
            unit = f", {summary['loss_unit']}" if summary.get("loss_unit") else ""
            lines.append(f"- held-out loss: {before}{final:.3f} after{unit}")
    return "\n".join(lines) + "\n"


def _relation(adapter: bool) -> str:
    return "adapter" if adapter else "finetune"
