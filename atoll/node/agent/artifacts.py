"""Artifacts: files of an ended process that match the job's patterns."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from atoll.code import Rules
from atoll.config import JobSpec
from atoll.errors import AtollError
from atoll.net.http.client import HubClient
from atoll.node.agent.workspace import Workspace
from atoll.node.processes.threads import StillWanted, in_thread
from atoll.wire.messages import Launch

log = logging.getLogger(__name__)

MAX_FILES = 1_000
MAX_BYTES = 8 * 2**30
"""Total size of the artifacts of one process."""

_MAX_LOOKED_AT = 200_000
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_DEPTH = 6
"""Of a path below the folder; the hub allows two more levels."""


async def collect(
    spec: JobSpec,
    prepared: Workspace,
    command: Launch,
    client: Callable[[], HubClient],
    on_line: Callable[[str], None],
) -> list[str]:
    """Upload the artifacts of an ended process; return their names at the hub. May be cancelled.

    They become files of the job, ``artifacts/MEMBER/PATH``; patterns are those of `.gitignore`
    files. Failures are reported in the log and do not fail the job. Links are not followed.
    """
    if not spec.job.artifacts:
        return []

    def say(text: str) -> None:
        on_line(f"[artifacts] {text}")

    return await in_thread(
        lambda wanted: _collect(spec, prepared.folder, command, client, say, wanted)
    )


def _collect(
    spec: JobSpec,
    folder: Path,
    command: Launch,
    client: Callable[[], HubClient],
    say: Callable[[str], None],
    wanted: StillWanted,
) -> list[str]:
    names: list[str] = []
    unsent, total = "the files", 0
    try:
        found = _choose(folder, Rules(spec.job.artifacts), say)
        if not found:
            say("no file matches " + ", ".join(spec.job.artifacts))
            return names
        with client() as hub:
            for path_there, path, nbytes in found:
                wanted.check()
                name = f"artifacts/{command.member}/{path_there}"
                unsent = f"{name} and the following files"
                hub.put_file(command.job, name, path, progress=wanted.check)
                names.append(name)
                total += nbytes
    except (AtollError, OSError) as error:
        log.warning("artifacts of %s %s: %s", command.job, command.member, error)
        say(f"{unsent} are not sent: {error}")
        return names
    say(f"{len(names)} files, {total / 1e6:.1f} MB")
    return names


def _choose(folder: Path, rules: Rules, say: Callable[[str], None]) -> list[tuple[str, Path, int]]:
    found: list[tuple[str, Path, int]] = []
    total = 0
    for name, path, nbytes in sorted(_files(folder, rules)):
        parts = name.split("/")
        if len(parts) > _MAX_DEPTH or not all(_PLAIN.fullmatch(part) for part in parts):
            say(f"{name!r} is left out: unsupported characters in its name, or nested too deeply")
        elif len(found) == MAX_FILES or total + nbytes > MAX_BYTES:
            say(f"{name!r} is left out: {MAX_FILES} files and {MAX_BYTES} bytes are the limit")
        else:
            found.append((name, path, nbytes))
            total += nbytes
    return found


def _files(folder: Path, rules: Rules) -> Iterator[tuple[str, Path, int]]:
    """Yield matching files, without following links."""
    looked_at = 0
    todo = [] if folder.is_symlink() else [folder]
    while todo:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                looked_at += 1
                if looked_at > _MAX_LOOKED_AT:
                    return
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    todo.append(path)
                elif entry.is_file(follow_symlinks=False):
                    name = path.relative_to(folder).as_posix()
                    if rules.takes(name):
                        yield name, path, entry.stat(follow_symlinks=False).st_size
