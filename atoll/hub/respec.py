"""Which changes of a job file a job can go on with from its checkpoint."""

from __future__ import annotations

from atoll.config import JobSpec, parse_spec
from atoll.errors import ConfigError


def check_change(old: JobSpec, text: str) -> JobSpec:
    """Return the changed job, if it can go on where the old one stands.

    The number of nodes, the strategy, the steps and the checkpoints may change; what the state is
    made of may not.

    Raises:
        ConfigError: the text is wrong, or changes what may not change; says which.
    """
    new = parse_spec(text)
    kept = {
        "[model]": (old.model, new.model),
        "[data]": (old.data, new.data),
        "seed in [job]": (old.job.seed, new.job.seed),
        "script in [job]": (old.job.script, new.job.script),
    }
    for name, (before, after) in kept.items():
        if before != after:
            raise ConfigError(
                f"{name} cannot change when a job is resumed",
                given=str(after),
                expected=str(before),
                remedy="submit it as a new job",
            )
    return new
