"""Short descriptions, for people, of what a job runs, how its members train, and their layout."""

from __future__ import annotations

import dataclasses
import re
from pathlib import PurePosixPath
from typing import Any

from atoll.config import JobSpec, largest_member
from atoll.config.rl_roles import member_roles


def describe_roles(spec: JobSpec) -> list[dict[str, Any]]:
    """Return the role of each slot, if roles differ."""
    return [dataclasses.asdict(role) for role in member_roles(spec.rl)] if spec.kind == "rl" else []


def describe_island(spec: JobSpec) -> str:
    """Return the layout of each member's processes; empty for one process."""
    largest = largest_member(spec)
    which = "" if largest is spec else "whole members: "
    machines = f" on {count} machines" if (count := largest.island.machines) > 1 else ""
    return f"{which}{largest.mesh}{machines}" if largest.mesh.ranks > 1 else ""


def describe_inner(spec: JobSpec) -> str:
    """Return the inner strategy of each member; empty for one plain process."""
    ranks, train = spec.mesh.ranks, spec.train
    words = [spec.strategy.inner or "local"] if not spec.job.script or spec.strategy.inner else []
    if ranks > 1:
        words.append(f"{ranks} ranks")
    if not (spec.job.script or spec.job.command or spec.kind == "rl"):  # those have their own
        words += [train.precision] if train.precision != "auto" else []
        words += [f"recompute {train.recompute}"] if train.recompute != "none" else []
    plain = ranks == 1 and train.precision in ("auto", "fp32") and train.recompute == "none"
    return "" if plain or spec.job.command or spec.kind == "rl" else ", ".join(words)


SHOWN_COMMAND = 60
"""Characters of a command in a job's description."""


def describe_work(spec: JobSpec) -> str:
    """Return what a job runs: a model, a script, a program, an image or policies."""
    if spec.kind == "rl":
        return ", ".join(
            dict.fromkeys(role.policy for role in member_roles(spec.rl) if role.policy)
        )
    if spec.job.script:
        return PurePosixPath(spec.job.script).name
    if spec.job.command:
        command = " ".join(" ".join(spec.job.command).split())
        return f"{command[: SHOWN_COMMAND - 1]}…" if len(command) > SHOWN_COMMAND else command
    name = spec.model.name
    return _MODELS.get(name, name.partition(":")[2] or name)


_MODELS = {
    "gpt": "GPT", "gpt2": "GPT-2", "llama": "Llama", "resnet": "ResNet", "vit": "ViT",
    "transformers": "Transformers model",
}  # fmt: skip


def describe_method(spec: JobSpec) -> str:
    """Return how the members of a job train together, e.g. `diloco int8 every 25`.

    Empty for scripts, which choose the method themselves.
    """
    if spec.job.command or spec.job.script or spec.kind == "rl":
        return ""
    strategy = spec.strategy
    every = strategy.options.get("every")
    codec = re.sub(r"^feedback\((.*)\)$", r"\1", strategy.codec)
    words = [strategy.outer or strategy.preset, codec, f"every {every}" if every else ""]
    return " ".join(filter(None, words))
