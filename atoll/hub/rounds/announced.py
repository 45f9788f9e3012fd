"""Checks whether a member was to save a part of a checkpoint that it announces.

Old checkpoints are deleted when a newer one is complete. A member that could announce any round
could therefore replace all checkpoints of a job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from atoll.errors import CheckpointCorrupt
from atoll.wire.manifest import SHARED_PART, member_part
from atoll.wire.messages import CheckpointPart

StageDue = Callable[[str, str, int, int], Awaitable[bool]]
"""Returns whether a member of a job was to save, as of a round, a stage."""


async def check_announced(
    job: str, member: str, part: CheckpointPart, *,
    stages: Sequence[str], newest: int | None, stage_due: StageDue,
) -> None:  # fmt: skip
    """Raise CheckpointCorrupt if a member was not to save a part.

    Args:
        job: Which job.
        member: Who announces it.
        part: What it announces.
        stages: Files of a model in stages; empty: the job has none.
        newest: Committed rounds of a job without stages; None: unknown.
        stage_due: Decides about files of stages.
    """
    own = stages or [member_part(member), SHARED_PART]
    if part.name not in own:
        raise CheckpointCorrupt(
            "a member announced a part that is not its own",
            given=f"{member}: {part.name}",
            expected=" or ".join(own),
        )
    if part.round < 0:
        due = False
    elif stages:
        due = await stage_due(job, member, part.round, stages.index(part.name))
    else:
        due = newest is None or part.round <= newest
    if not due:
        raise CheckpointCorrupt(
            "a member announced a part that it was not to save",
            given=f"{member}: {part.name} of round {part.round}",
            expected="a round that is committed, and a stage that this member was asked to save",
        )
