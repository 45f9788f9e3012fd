"""Hides the values of secrets in what a process prints or reports."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from atoll.config.tables import CheckpointTable, JobSpec, LaunchTable

SECRET = "secret:"
"""Prefix of a value that is the name of a secret."""
SHORTEST = 8
"""Characters of the shortest value that is hidden; shorter ones occur in output by chance."""


class Redaction:
    """Replaces every value by `(secret NAME)`, also each line of values with several lines."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        """Hide the values of `secrets`, by name."""
        pairs = [
            (part, f"(secret {name})")
            for name, value in secrets.items()
            for part in {value, *value.splitlines()}
            if len(part) >= SHORTEST
        ]
        self._pairs = sorted(pairs, key=lambda pair: -len(pair[0]))

    @classmethod
    def of_environment(cls, launch: LaunchTable) -> Redaction:
        """Return the redaction of a job's own process, which has the values as variables."""
        names = dict(map(split_secret, launch.secrets))
        return cls({name: os.environ.get(variable, "") for variable, name in names.items()})

    def __bool__(self) -> bool:
        """Return whether there is anything to hide."""
        return bool(self._pairs)

    def __call__(self, text: str) -> str:
        """Return a text without the values."""
        for value, shown in self._pairs:
            text = text.replace(value, shown)
        return text

    def fields(self, error: Mapping[str, str]) -> dict[str, str]:
        """Return the fields of an error without the values."""
        return {key: self(text) for key, text in error.items()}


def split_secret(entry: str) -> tuple[str, str]:
    """Return variable and secret of an entry of `secrets` in `[launch]`: NAME or VARIABLE=NAME."""
    variable, equals, name = entry.partition("=")
    return variable, name if equals else variable


def secrets_of(spec: JobSpec) -> list[str]:
    """Return the names of all secrets that a job uses, for its processes and for its copies."""
    launch = [name for _, name in map(split_secret, spec.launch.secrets)]
    return sorted({*launch, *secrets_of_copies(spec.checkpoint)})


def secrets_of_copies(checkpoint: CheckpointTable) -> list[str]:
    """Return the names of the secrets with which checkpoints are copied."""
    values = (line.partition("=")[2] for line in checkpoint.to_options)
    return sorted({text.removeprefix(SECRET) for text in values if text.startswith(SECRET)})


def copy_options(checkpoint: CheckpointTable, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the options of the driver for copies, with the values of `secrets` in them."""
    options = {}
    for line in checkpoint.to_options:
        name, _, text = line.partition("=")
        options[name] = secrets[text.removeprefix(SECRET)] if text.startswith(SECRET) else text
    return options


def secrets_here(names: Iterable[str]) -> dict[str, str | None]:
    """Return the secrets' values in this process's own environment; None: there is none."""
    return {name: os.environ.get(name) for name in names}


def variables_of(entries: Iterable[str], values: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a job's secrets."""
    return {variable: values[name] for variable, name in map(split_secret, entries)}
