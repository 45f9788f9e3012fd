"""The workspace of a process: its code, and a Python with its packages."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.net.http.client import HubClient
from atoll.node.packages.code_cache import MAX_CACHE_BYTES as MAX_CODE_BYTES
from atoll.node.packages.code_cache import CodeCache
from atoll.node.packages.venvs import BUILD_S, VenvRecipe, Venvs
from atoll.node.packages.venvs import MAX_CACHE_BYTES as MAX_VENV_BYTES
from atoll.node.processes.file_locks import FileLock
from atoll.wire.messages import Launch

FOLDER = "code"

MAX_REQUIREMENTS_BYTES = 256 * 2**10


@dataclass(frozen=True, slots=True)
class Workspace:
    """Working folder and Python of a process."""

    folder: Path
    python: Path
    lock: FileLock | None = None
    """Held while its environment is in use; None: it uses the agent's own Python."""


class WorkspaceBuilder:
    """Prepares workspaces; code and environments are cached in the agent's home."""

    def __init__(
        self,
        home: Path,
        client: Callable[[str], HubClient],
        *,
        max_code_bytes: int = MAX_CODE_BYTES,
        max_venv_bytes: int = MAX_VENV_BYTES,
        build_s: float = BUILD_S,
    ) -> None:
        """Cache code in ``home/code`` and environments in ``home/venvs``, up to the given sizes.

        `client` returns a client of the hub for a token; `build_s` limits the build of an
        environment.
        """
        self._client = client
        self._code = CodeCache(home / "code", max_bytes=max_code_bytes)
        self._venvs = Venvs(home / "venvs", max_bytes=max_venv_bytes, build_s=build_s)

    @property
    def children(self) -> set[int]:
        """Process ids of running builds."""
        return self._venvs.children

    async def prepare(
        self, command: Launch, spec: JobSpec, *, directory: Path, on_line: Callable[[str], None]
    ) -> Workspace:
        """Fetch the code of a job and build its environment, unless they are cached.

        May be cancelled: what it started is killed, and nothing incomplete is left. The code
        replaces ``directory/code``.

        Raises:
            ConfigError: the job's code or requirements are invalid.
            JobError: building its environment took too long, or the network failed.
            HubError: the hub does not have its code, or is unreachable.
            StorageFull: this machine's disk is full.
        """
        here = Path(sys.executable)
        if not spec.job.code:
            return Workspace(directory, here)

        def say(text: str) -> None:
            on_line(f"[prepare] {text}")

        sha256 = spec.job.code.removeprefix("sha256:")
        folder = directory / FOLDER
        client = functools.partial(self._client, command.token)
        count, fetched = await self._code.unpack(sha256, folder, client=client)
        say(f"code {sha256[:12]}: {count} files, {'fetched' if fetched else 'in the cache'}")
        if not spec.job.requirements:
            return Workspace(folder, here)
        recipe = VenvRecipe(
            requirements=_read(folder, spec.job.requirements),
            name=spec.job.requirements,
            code=sha256,
            folder=folder,
        )
        use = await self._venvs.use(recipe, on_line=say)
        say(f"environment of {spec.job.requirements}: {use.python.parent.parent.name[:12]}")
        return Workspace(folder, use.python, use.lock)

    def release(self, prepared: Workspace) -> None:
        """Unlock the environment of an ended process, so that it may be deleted."""
        if prepared.lock is not None:
            prepared.lock.release()


def _read(folder: Path, name: str) -> str:
    """Return the text of the requirements file.

    Raises:
        ConfigError: it is missing, or not text.
    """
    path = folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
        if inside and path.stat().st_size <= MAX_REQUIREMENTS_BYTES:
            return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        pass
    raise ConfigError(
        "the code of the job has no such file of requirements",
        given=repr(name),
        expected="a text file in the folder of the code",
        remedy="see `requirements` in [job], and whether .atollignore leaves it out",
    )
