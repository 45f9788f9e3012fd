"""Which texts may travel with a job."""

from __future__ import annotations

import contextlib

from atoll.errors import ConfigError
from atoll.ids import check_name

MAX_FILES = 64
MAX_FILES_BYTES = 8 * 2**20
"""Text that travels with a job, in all; larger things are put as files."""


def check_files(files: dict[str, str]) -> None:
    """Refuse file names that leave the job's folder, and too much text.

    Raises:
        ConfigError: says which.
    """
    if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_FILES_BYTES:
        raise ConfigError(
            "too many files travel with this job",
            given=f"{len(files)} files, {sum(map(len, files.values()))} characters",
            expected=f"at most {MAX_FILES} files and {MAX_FILES_BYTES} characters in all",
        )
    reserved = {"job.toml", "events.jsonl", "metrics.jsonl"}
    for name in files:
        with contextlib.suppress(ConfigError):
            check_name("file", name.lower())
            if name not in reserved:
                continue
        raise ConfigError(
            "this file name cannot travel with a job",
            given=repr(name),
            expected="a plain name such as train.py, without folders",
        )
