"""Python environments of jobs, built once per set of requirements.

An environment sees the agent's packages after its own, so atoll and torch are not installed again;
pip keeps packages with a suitable version. The key is a hash of everything that determines the
content. An entry is valid if its `ready.json` exists, which is written last. Builders lock it
exclusively, agents with running processes share it, so that none is built twice or deleted in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import atoll
from atoll.errors import AtollError, ConfigError, JobError, StorageFull
from atoll.node.packages.build import Build, BuildFailed, OnLine
from atoll.node.processes.file_locks import FileLock
from atoll.node.processes.threads import in_thread

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 20 * 2**30

BUILD_S = 3600.0
"""Time limit of a build: a GPU's libraries are gigabytes."""

_READY = "ready.json"
_SOURCE = "source"
_REQUIREMENTS = "requirements.txt"

_BY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[^\]]*\])?\s*([<>=!~;(@ ].*)?")
_OPTION = re.compile(
    r"(-i|-f|--(index-url|extra-index-url|find-links))[ =]\s*https?://\S+"
    r"|--(no-index|pre|prefer-binary|require-hashes)"
    r"|--(no-binary|only-binary|trusted-host|use-feature)[ =]\s*\S+"
)
_NETWORK = re.compile(
    r"Retrying \(Retry\(|ReadTimeout|ConnectionError|ProxyError|NewConnectionError"
    r"|Temporary failure in name resolution|Network is unreachable|IncompleteRead"
)


@dataclass(frozen=True, slots=True)
class VenvRecipe:
    """Inputs of an environment."""

    requirements: str
    """Text of the requirements file."""
    name: str
    """Path of that file in the code."""
    code: str
    folder: Path
    """A fresh copy of the code, for requirements that refer to it."""

    @property
    def alone(self) -> bool:
        """Whether the requirements refer to no file of the code."""
        text = re.sub(r"\\\n", "", self.requirements)
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
        return all(
            not line
            or _OPTION.fullmatch(line)
            or (_BY_NAME.fullmatch(line) and "file:" not in line)
            for line in lines
        )

    def key(self) -> str:
        """Return the hash that identifies this environment; reads the agent's packages."""
        parts = [
            self.requirements, "" if self.alone else f"{self.code} {self.name}", sys.version,
            sys.prefix, *_site_folders(), *_base_packages(),
        ]  # fmt: skip
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class VenvUse:
    """An environment in use; it is not deleted until `lock` is released."""

    python: Path
    lock: FileLock


class Venvs:
    """Environments in one folder, which several agents of this machine may share."""

    def __init__(
        self, folder: Path, *, max_bytes: int = MAX_CACHE_BYTES, build_s: float = BUILD_S
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._build_s = build_s
        self._builds: set[Build] = set()

    @property
    def children(self) -> set[int]:
        """Process ids of running builds."""
        return {build.pid for build in self._builds if build.pid}

    async def use(self, recipe: VenvRecipe, *, on_line: OnLine) -> VenvUse:
        """Return the environment of a recipe, built if necessary.

        Raises:
            ConfigError: pip cannot satisfy the requirements.
            JobError: it took too long, or the network failed.
            StorageFull: the disk is full.
        """
        key = await in_thread(lambda wanted: recipe.key())
        folder, lock = self._folder / key, FileLock(self._folder / f"{key}.lock")

        def waiting() -> None:
            on_line("another process builds the environment of the same requirements: waiting")

        try:
            while True:
                await lock.lock(shared=True, on_wait=waiting)
                if (folder / _READY).is_file():
                    os.utime(folder / _READY)
                    return VenvUse(_python(folder), lock)
                await lock.lock(shared=False, on_wait=waiting)
                if not (folder / _READY).is_file():
                    await self._build(recipe, folder, on_line)
                lock.release()
                await in_thread(lambda wanted: self._trim(keep=folder))
        except BaseException:
            lock.release()
            raise

    async def _build(self, recipe: VenvRecipe, folder: Path, on_line: OnLine) -> None:
        build = Build(on_line=on_line)
        self._builds.add(build)
        try:
            async with asyncio.timeout(self._build_s):
                await self._install(recipe, folder, build)
        except TimeoutError:
            raise JobError(
                "the environment of the job was not ready in time",
                given=f"{self._build_s:.0f} s; the last lines: {build.last_lines()}",
                remedy="check that this machine reaches the package index",
            ) from None
        except OSError as error:
            raise StorageFull(
                "the environment of a job cannot be written", given=f"{folder} ({error})"
            ) from error
        finally:
            self._builds.discard(build)
            if not (folder / _READY).is_file():
                # Not in a thread: this task may be in the middle of a cancellation.
                shutil.rmtree(folder, ignore_errors=True)

    async def _install(self, recipe: VenvRecipe, folder: Path, build: Build) -> None:
        await in_thread(lambda wanted: shutil.rmtree(folder, ignore_errors=True))
        with_pip = importlib.util.find_spec("pip") is None
        make = [sys.executable, "-m", "venv", *([] if with_pip else ["--without-pip"]), str(folder)]
        await self._run(build, make, cwd=self._folder)
        (_site_packages(folder) / "_agent.pth").write_text(_pth(), "utf-8", newline="\n")
        if recipe.alone:
            source = folder
            requirements = folder / _REQUIREMENTS
            requirements.write_text(recipe.requirements, "utf-8", newline="\n")
        else:
            source = folder / _SOURCE
            await in_thread(lambda wanted: shutil.copytree(recipe.folder, source))
            requirements = source / recipe.name
        install = [
            str(_python(folder)), "-m", "pip", "install", "--no-input", "--progress-bar", "off",
            "--disable-pip-version-check", "-r", str(requirements),
        ]  # fmt: skip
        await self._run(build, install, cwd=source)
        nbytes = await in_thread(lambda wanted: _bytes_in(folder))
        scratch = folder / f"{_READY}.new"
        scratch.write_text(json.dumps({"nbytes": nbytes}), "utf-8", newline="\n")
        scratch.replace(folder / _READY)

    async def _run(self, build: Build, command: list[str], *, cwd: Path) -> None:
        try:
            await build.run(command, cwd=cwd)
        except BuildFailed as failure:
            raise _explain(failure, build) from failure

    def _trim(self, *, keep: Path) -> None:
        """Delete the least recently used environments that are not locked."""
        found = []
        for left in self._folder.glob(".*"):  # of an agent killed during a deletion
            shutil.rmtree(left, ignore_errors=True)
        for ready in self._folder.glob(f"*/{_READY}"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                nbytes = int(json.loads(ready.read_text("utf-8"))["nbytes"])
                found.append((ready.stat().st_mtime_ns, nbytes, ready.parent))
        total = sum(nbytes for _, nbytes, _ in found)
        for _, nbytes, folder in sorted(found):
            if total <= self._max_bytes:
                return
            lock = FileLock(self._folder / f"{folder.name}.lock")
            if folder == keep or not lock.try_lock(shared=False):
                continue
            # Renamed first, so that none is half deleted. Fails if it is in use (Windows).
            away = folder.with_name(f".{folder.name}")
            with contextlib.suppress(OSError):
                folder.rename(away)
                total -= nbytes
                log.info("environment %s was not used for longest: deleted", folder.name[:12])
            shutil.rmtree(away, ignore_errors=True)
            lock.release()


def _explain(failure: BuildFailed, build: Build) -> AtollError:
    lines = build.last_lines()
    if _NETWORK.search(build.output()):
        return JobError(
            "the environment of the job could not be built: the network failed",
            given=lines,
            remedy="check that this machine reaches the package index",
        )
    return ConfigError(
        "the environment of the job cannot be built",
        given=f"{failure.step} ended with {failure.code}: {lines}",
        remedy="try `pip install -r` with the same file and the same Python by hand",
    )


def _python(folder: Path) -> Path:
    windows = sys.platform == "win32"
    return folder / ("Scripts/python.exe" if windows else "bin/python")


def _site_packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))


def _site_folders() -> list[str]:
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    user = site.getusersitepackages()
    found = dict.fromkeys([*own, *([user] if user in sys.path else [])])
    return list(found)


def _pth() -> str:
    """Return the .pth file that adds the agent's packages after the environment's own.

    `addsitedir` also follows the `.pth` files there: packages may be installed as links.
    """
    lines = [f"import site; site.addsitedir({folder!r})" for folder in _site_folders()]
    return "\n".join([*lines, str(Path(atoll.__file__).resolve().parents[1]), ""])


def _base_packages() -> list[str]:
    distributions = importlib.metadata.distributions(path=_site_folders())
    return sorted({f"{found.name}=={found.version}" for found in distributions})


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))
