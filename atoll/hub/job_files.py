"""Which texts may travel with a job."""

from __future__ import annotations

import contextlib
import re

from atoll.config import JobSpec
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


_PACK = re.compile(r"sha256:([0-9a-f]{64})")
_LABEL = re.compile(r"[ -~]{0,128}")


def code_of(spec: JobSpec) -> str:
    """Return the SHA-256 of the pack that a job's code travels in; empty: it brings none.

    Raises:
        ConfigError: it names a folder: only a client can pack that.
    """
    if not spec.job.code:
        return ""
    found = _PACK.fullmatch(spec.job.code)
    if found is None:
        raise ConfigError(
            "the code of this job is not at the hub",
            given=f"code = {spec.job.code!r}",
            expected="sha256:HEX of a pack that was sent before",
            remedy="submit it with `atoll run`, which packs and sends the folder",
        )
    return found[1]


def check_labels(*, batch: str, key: str) -> None:
    """Refuse labels that nobody could show.

    Raises:
        ConfigError: says which.
    """
    for name, text in {"batch": batch, "key": key}.items():
        if not _LABEL.fullmatch(text):
            raise ConfigError(
                f"this {name} cannot be a label",
                given=repr(text[:200]),
                expected="at most 128 printable ASCII characters",
            )
