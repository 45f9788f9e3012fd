"""Daemons for containers that tests start themselves, with images made of this machine's files."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil
import pytest

from atoll.errors import AtollError
from atoll.node.launchers.container_daemon import connect
from tests.patience import PATIENCE_S

START_S = 60.0

PROGRAMS = ("sh", "cat", "echo", "sleep", "id", "touch", "head", "tail", "true")

# A private mount namespace: where control groups are in hybrid mode only their first version can
# be used, and nothing that is mounted survives.
DOCKERD = """
umount /sys/fs/cgroup/unified 2>/dev/null
exec dockerd --storage-driver=vfs --iptables=false --ip6tables=false --bridge=none \
  --data-root "$1/data" --exec-root "$1/exec" -p "$1/pid" -H "unix://$1/s.sock" \
  --default-ulimit "nofile=1024:$(ulimit -Hn)"
"""
PODMAN = """
umount /sys/fs/cgroup/unified 2>/dev/null
exec podman --root "$1/data" --runroot "$1/run" --storage-driver vfs \
  system service --time 0 "unix://$1/s.sock"
"""


@dataclass(frozen=True)
class Daemon:
    """A daemon for containers."""

    host: str
    """Its address, as in DOCKER_HOST."""

    def client(self) -> docker.DockerClient:
        return docker.DockerClient(base_url=self.host, timeout=PATIENCE_S)

    def names(self) -> list[str]:
        """Return the names of all its containers, also of those that have ended."""
        with contextlib.closing(self.client()) as client:
            found = client.containers.list(all=True, ignore_removed=True)
            return [str(container.name) for container in found]


@contextlib.contextmanager
def start_daemon(kind: str, folder: Path) -> Iterator[Daemon]:
    """Run a daemon of its own, told by DOCKER_HOST; skip where it cannot run, with the reason."""
    program = "dockerd" if kind == "docker" else kind
    if not sys.platform.startswith("linux") or os.getuid() != 0:
        pytest.skip(f"{program} needs root on Linux here")
    for needed in (program, "unshare"):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed")
    script = DOCKERD if kind == "docker" else PODMAN
    with (folder / "log").open("wb") as log:
        popen = subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", str(folder)],
            stdout=log,
            stderr=log,
        )
    try:
        daemon = Daemon(f"unix://{folder}/s.sock")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", daemon.host)
            _await(popen, folder / "log")
            yield daemon
        _remove_all(daemon)
    finally:
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(timeout=10)
        for process in _belonging(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        popen.wait(timeout=PATIENCE_S)


def _await(popen: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(AtollError):
            connect().close()
            return
        if popen.poll() is not None or time.monotonic() > deadline:
            reason = log.read_text(errors="replace").strip().splitlines()[-1:]
            pytest.skip(f"no daemon can run here: {reason}")
        time.sleep(0.1)


def _remove_all(daemon: Daemon) -> None:
    with contextlib.closing(daemon.client()) as client:
        for container in client.containers.list(all=True, ignore_removed=True):
            container.remove(force=True)


def _belonging(folder: Path) -> Iterator[psutil.Process]:
    """Yield what the daemon has started and has outlived it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()):
                yield process


def import_image(daemon: Daemon, name: str, archive: bytes, *changes: str) -> None:
    """Make an image of the files in an archive."""
    repository, _, tag = name.partition(":")
    with contextlib.closing(daemon.client()) as client:
        client.api.import_image_from_data(archive, repository=repository, tag=tag, changes=changes)


def small_archive(programs: Iterable[str] = PROGRAMS) -> bytes:
    """Return an archive with a few programs of this machine and their libraries."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        add_folder(archive, "tmp", mode=0o1777)
        paths = {f"bin/{program}": str(shutil.which(program)) for program in programs}
        for path in list(paths.values()):
            paths.update({library.lstrip("/"): library for library in _libraries(path)})
        for folder in sorted({str(up) for name in paths for up in Path(name).parents} - {"."}):
            add_folder(archive, folder)
        for name, path in paths.items():
            archive.add(os.path.realpath(path), name)
    return out.getvalue()


def linked_archive() -> bytes:
    """Return an archive without files: its folders lead into /usr, which is to be mounted."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
        add_folder(archive, "usr")
        add_folder(archive, "tmp", mode=0o1777)
    return out.getvalue()


def add_folder(archive: tarfile.TarFile, name: str, *, mode: int = 0o755) -> None:
    folder = tarfile.TarInfo(name)
    folder.type, folder.mode = tarfile.DIRTYPE, mode
    archive.addfile(folder)


def _libraries(program: str) -> list[str]:
    done = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    return [word for word in done.stdout.split() if word.startswith("/")]
