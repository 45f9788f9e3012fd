"""What a job's losses are measured in, for charts, tables and reports."""

from __future__ import annotations

from atoll.config.tables import JobSpec
from atoll.config.tune_tables import LOSS_UNITS

IMAGE_KINDS = ("folder", "shards", "fashion-mnist", "idx", "segments")
"""Kinds of `corpus` whose samples are images: those of `atoll.data`, which the hub does not load. A
test compares both."""


def loss_unit(spec: JobSpec) -> str:
    """Return the unit, e.g. `nats per token`; empty: the job's own program decides."""
    if spec.kind != "trainer":
        return ""
    if spec.tune.active:
        return LOSS_UNITS[spec.tune.objective]
    return f"nats per {'image' if spec.data.corpus.partition(':')[0] in IMAGE_KINDS else 'token'}"
