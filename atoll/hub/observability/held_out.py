"""The names of held-out metrics, and the held-out loss of one state of a job."""

from __future__ import annotations

import msgspec

from atoll.hub.db.database import Database

HELD_OUT_LOSS = "held_out_loss"
HELD_OUT_LOSS_SUM = "held_out_loss_sum"
HELD_OUT_TOKENS = "held_out_tokens"
"""Held-out metrics of members: loss in nats per token, its sum, and the number of tokens."""

HELD_OUT_ACCURACY = "held_out_accuracy"
"""Fraction of the held-out samples that were classified correctly, at the end of a SWARM."""

HELD_OUT = frozenset({HELD_OUT_LOSS, HELD_OUT_LOSS_SUM, HELD_OUT_TOKENS})


async def held_out_at(database: Database, job: str, step: int) -> float | None:
    """Return the held-out loss of the state at a step, the members' shares added."""
    rows = await database.read(
        lambda connection: connection.execute(
            'SELECT "values" FROM points WHERE job = ? AND kept = 1 AND step = ? ORDER BY id',
            (job, step),
        ).fetchall()
    )
    found = [msgspec.json.decode(values) for (values,) in rows]
    whole = [values[HELD_OUT_LOSS] for values in found if HELD_OUT_LOSS in values]
    tokens = sum(values.get(HELD_OUT_TOKENS, 0.0) for values in found)
    loss_sum = sum(values.get(HELD_OUT_LOSS_SUM, 0.0) for values in found)
    return whole[-1] if whole else loss_sum / tokens if tokens else None
