"""The hub's image is really built and started, where a daemon for containers runs; if asked for.

No registry is asked: the base image is made of this machine's own Python and a few programs, and
the packages come from this test.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import os
import re
import shutil
import ssl
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.bindings import _rust

pytest.importorskip("docker", reason="the extra atoll[docker] is not installed")

from bench.kit.ports import free_port
from tests.containers.daemons import Daemon, add_folder, import_image, small_archive, start_daemon
from tests.deploy.dockerfiles import ROOT
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.skipif(
        "ATOLL_TEST_IMAGES" not in os.environ,
        reason="building an image takes minutes on a busy machine: set ATOLL_TEST_IMAGES=1",
    ),
]
BASE = "python-of-this-machine:1"
ENVIRONMENT = ("ENV PATH=/usr/local/bin:/usr/bin:/bin", "ENV LD_LIBRARY_PATH=/usr/local/lib")
PROGRAMS = ("sh", "install", "useradd", "cat")
C_LIBRARY = ("librt.so.1", "libpthread.so.0", "libdl.so.2", "libutil.so.1", "libm.so.6")
LEFT_OUT = re.compile(
    r"/(test|tests|idlelib|turtledemo|tkinter|lib2to3|pydoc_data|_tkinter[^/]*|site-packages|__pycache__|config-[^/]*)(/|$)"
)


TEXTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "etc/shadow": "root:*:19000:0:99999:7:::\n",
    "etc/gshadow": "root:*::\n",
}


def base_archive(packages: str, scratch: Path) -> bytes:
    """Return a root file system with a Python that gets its packages from an address."""
    texts = {**TEXTS, "etc/pip.conf": f"[global]\nno-index = true\nfind-links = {packages}\n"}
    out = io.BytesIO(small_archive(PROGRAMS))
    out.seek(0)
    with tarfile.open(fileobj=out, mode="a") as archive:
        known = set(archive.getnames())
        for folder in ("usr", "usr/local", "usr/local/bin", "usr/local/lib", "etc", "var/tmp"):
            if folder not in known:
                add_folder(archive, folder)
        _add_python(archive, known, scratch)
        if Path("/etc/login.defs").exists():
            archive.add("/etc/login.defs", "etc/login.defs")
        for name, content in texts.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content.encode()))
    return out.getvalue()


def _add_python(archive: tarfile.TarFile, known: set[str], scratch: Path) -> None:
    """Add this machine's Python below /usr/local, with the libraries that it needs."""
    library = Path(sysconfig.get_path("stdlib"))
    program = os.path.realpath(Path(sys.base_prefix) / "bin" / "python3")
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    archive.add(program, f"usr/local/bin/{name}")
    for alias in ("python", "python3"):
        link = tarfile.TarInfo(f"usr/local/bin/{alias}")
        link.type, link.linkname = tarfile.SYMTYPE, name
        archive.addfile(link)
    archive.add(
        library, f"usr/local/lib/{name}",
        filter=lambda info: None if LEFT_OUT.search("/" + info.name) else info,
    )  # fmt: skip
    extensions = [path for path in library.glob("lib-dynload/*.so") if "tkinter" not in path.name]
    programs = [Path(program), Path(str(_rust.__file__)), *extensions]
    for needed in sorted({path for file in programs for path in _libraries(file)}):
        own = needed.startswith(sys.base_prefix)  # its place may be closed to other users
        there = f"usr/local/lib/{Path(needed).name}" if own else needed.lstrip("/")
        if there not in known:
            archive.add(_stripped(os.path.realpath(needed), scratch), there)


def _stripped(library: str, scratch: Path) -> str:
    """Return a library without what only debuggers need, which is most of Python's."""
    target = scratch / Path(library).name
    if shutil.which("strip") is None:
        return library
    done = subprocess.run(
        ["strip", "--strip-unneeded", "-o", str(target), library], capture_output=True, check=False
    )
    return library if done.returncode else str(target)


def _libraries(program: str | Path) -> list[str]:
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    found = [word for word in done.stdout.split() if word.startswith("/")]
    beside = {Path(path).parent for path in found if "/libc.so" in path}
    return [*found, *(str(folder / name) for folder in beside for name in C_LIBRARY)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Iterator[Daemon]:
    handler = functools.partial(_Quiet, directory=str(wheels))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    packages = f"http://127.0.0.1:{server.server_address[1]}/"
    archive = base_archive(packages, tmp_path_factory.mktemp("stripped"))
    with start_daemon("docker", tmp_path_factory.mktemp("daemon")) as started:
        import_image(started, BASE, archive, *ENVIRONMENT)
        yield started
    server.shutdown()
    server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def image(daemon: Daemon) -> str:
    """Build the hub's image."""
    import docker.errors

    with contextlib.closing(daemon.client()) as client:
        client.api.timeout = 240
        try:
            built, _ = client.images.build(
                path=str(ROOT), dockerfile="deploy/hub.Dockerfile", tag="atoll-hub:test",
                buildargs={"PYTHON": BASE}, network_mode="host", rm=True, forcerm=True,
            )  # fmt: skip
        except docker.errors.BuildError as error:
            said = "".join(line.get("stream", "") for line in error.build_log)
            raise AssertionError(said[-3000:]) from error
        return str(built.id)


def test_the_image_is_what_the_file_says(daemon: Daemon, image: str) -> None:
    with contextlib.closing(daemon.client()) as client:
        details: Any = client.images.get(image).attrs
        base: Any = client.images.get(BASE).attrs
    assert details["Config"]["User"] == "10001:10001"
    assert details["Config"]["Entrypoint"] == ["atoll"]
    assert details["Config"]["Healthcheck"]["Test"][0] == "CMD"
    assert details["Size"] - base["Size"] < 300_000_000


def test_hub_in_a_container_answers_and_stops_on_request(daemon: Daemon, image: str) -> None:
    port = free_port()
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with contextlib.closing(daemon.client()) as client:
        client.api.timeout = 120
        container = client.containers.run(
            image, ["hub", "--data", "/data/hub", "--runs", "/data/runs", "--port", str(port),
                    "--ticket-file", "/ticket/ticket"],
            detach=True, network_mode="host", read_only=True, cap_drop=["ALL"],
            tmpfs={"/tmp": ""}, volumes={"ticket-of-test": {"bind": "/ticket", "mode": "rw"}},
        )  # fmt: skip
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    address = f"https://127.0.0.1:{port}/healthz"
                    urllib.request.urlopen(address, context=trusting, timeout=2).close()
                    break
                except OSError:
                    container.reload()
                    said = container.logs().decode()
                    assert container.status == "running", said
                    assert time.monotonic() < deadline, said
                    time.sleep(0.2)
            ticket = container.exec_run(["cat", "/ticket/ticket"])
            assert ticket.output.startswith(b"atoll://"), ticket.output
            backup = container.exec_run(["atoll", "hub", "backup", "/data/backups"])
            assert backup.exit_code == 0, backup.output
            container.stop(timeout=60)
            assert container.wait()["StatusCode"] == 0
        finally:
            container.remove(force=True, v=True)
