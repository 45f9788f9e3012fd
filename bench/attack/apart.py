"""Programs of jobs on machines whose owners keep them apart: in a sandbox, and in containers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atoll.errors import AtollError
from atoll.net.endpoint import parse_ticket
from atoll.node.launchers import landlock
from atoll.node.launchers.sandbox import has_own_network, level
from bench.attack.attacks import NotTried, Suite, hold
from bench.attack.session import WAIT_S, until
from bench.attack.site import Site

suite = Suite()

BOXED = "boxed"
SANDBOX = "a program in the sandbox sees its own files, and reaches its hub only"
CONTAINER = "a container reaches nothing of its machine but what the owner mounts"

CURIOUS = """
import json, os, pathlib, signal, socket, sys
home, port, hub = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(":")
private = sys.argv[5:]

def any_of(paths):
    found = [p for p in paths if not tried(lambda: open(p).read()).startswith("refused")]
    if not found:
        raise PermissionError
    return found

def tried(what):
    try:
        return str(what())[:40]
    except Exception as error:
        return "refused " + type(error).__name__

def connect(place):
    with socket.create_connection(place, 5.0):
        return "connected"

def named(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(path)
        return "connected"

found = {
    "private files": tried(lambda: any_of(private)),
    "home": tried(lambda: os.listdir(home)),
    "other jobs": tried(lambda: os.listdir(home + "/jobs")),
    "users": tried(lambda: list(pathlib.Path.home().iterdir())[0]),
    "write": tried(lambda: pathlib.Path(home, "evil").write_text("x")),
    "agent": tried(lambda: os.kill(os.getppid(), signal.SIGTERM)),
    "memory": tried(lambda: open(f"/proc/{os.getppid()}/environ").read(1) or 1 / 0),
    "another port": tried(lambda: connect(("127.0.0.1", port))),
    "the network": tried(lambda: connect(("192.0.2.1", 80))),
    "a program's socket": tried(lambda: named(sys.argv[4])),
    "hub": tried(lambda: connect((hub[0], int(hub[1])))),
}
print("FOUND " + json.dumps(found), flush=True)
"""


@contextlib.contextmanager
def _listening() -> Iterator[tuple[int, list[object]]]:
    """Listen at a port of this machine; give it, and who has come."""
    came: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, address = listener.accept()
                    came.append(address)
                    line.close()

        threading.Thread(target=listen, daemon=True).start()
        yield listener.getsockname()[1], came
        listener.shutdown(socket.SHUT_RDWR)


def _machine(site: Site, name: str, policy: str) -> Path:
    home = site.cluster.folder / "nodes" / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "node.toml").write_text(policy, encoding="utf-8", newline="\n")
    site.cluster.start_node(name)
    until(lambda: site.node_state(name) == "online", f"{name} is online")
    return home


def _found(site: Site, job: str) -> dict[str, Any]:
    """Return what a curious program printed, after its end."""
    view = until(
        lambda: (v := site.operator.job(job))["ended"] and v, f"{job} ends", wait_s=2 * WAIT_S
    )
    lines = [str(line.get("text", line)) for line in site.operator.logs(job)["lines"]]
    for line in lines:
        if "FOUND " in line:
            return dict(json.loads(line.partition("FOUND ")[2]))
    raise RuntimeError(f"{job} ended {view['state']} ({view['reason']}): {lines[-5:]}")


@suite.attack(SANDBOX, quick=False)
def look_around_in_the_sandbox(site: Site) -> str:
    if not landlock.version():
        raise NotTried("this kernel has no Landlock: such a machine refuses programs")
    home = _machine(site, BOXED, 'sandbox = "on"\n')
    files = [path for path in home.rglob("*") if path.is_file()]
    secret = [path for path in files if not path.name.startswith("ca-")]  # of the hub, public
    private = [str(path) for path in secret if not path.stat().st_mode & 0o077]
    hold(private, "the machine has no private file: nothing was tried")
    with _listening() as (port, came), socket.socket(socket.AF_UNIX) as of_a_program:
        place = f"/tmp/atoll-attack-{os.getpid()}"
        of_a_program.bind(place)
        of_a_program.listen()
        try:
            hub = urlsplit(parse_ticket(site.cluster.ticket).url)
            words = [str(home), str(port), f"{hub.hostname}:{hub.port}", place, *private]
            spec = f'[job]\nname = "look"\nnodes = 1\non = ["{BOXED}"]\nscript = "curious.py"\n'
            job = site.operator.submit(
                spec + f"args = {json.dumps(words)}\n", files={"curious.py": CURIOUS}
            )
            found = _found(site, job)
        finally:
            Path(place).unlink()
    keys = ["private files", "home", "other jobs", "users", "write", "memory", "another port"]
    if has_own_network():
        keys += ["the network", "a program's socket"]
    if landlock.keeps_signals():
        keys.append("agent")
    got = {key: found[key] for key in keys if not found[key].startswith("refused")}
    hold(not got, f"the program got {got}")
    hold(not came, "it reached another port of the machine")
    hold(found["hub"] == "connected", f"it does not reach its hub: {found['hub']}")
    hold(site.node_state(BOXED) == "online", "the agent is gone")
    return f"{len(keys)} tries refused, its hub answers; {level()}"


def _archive() -> bytes:
    """Return an image with a shell of this machine, and what that loads."""
    held, paths = io.BytesIO(), set[str]()
    with tarfile.TarFile(fileobj=held, mode="w") as tar:
        for name in ("sh", "cat", "ls", "id", "touch", "mount"):
            program = shutil.which(name)
            if program is None:
                continue
            said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
            libraries = {w for w in said.stdout.split() if w.startswith("/")}
            paths |= {program, *libraries}
        parents = {str(above).strip("/") for path in paths for above in Path(path).parents}
        for parent in sorted(parents - {""}):
            folder = tarfile.TarInfo(parent)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for path in sorted(paths):
            tar.add(os.path.realpath(path), arcname=path, recursive=False)
    return held.getvalue()


@contextlib.contextmanager
def _daemon(folder: Path) -> Iterator[str]:
    """Give the address of a daemon for containers: one of its own, which is ended."""
    needed = [name for name in ("dockerd", "unshare", "docker") if not shutil.which(name)]
    if needed or sys.platform != "linux" or os.getuid() != 0:
        raise NotTried(f"a daemon needs root on Linux, and {', '.join(needed) or 'nothing else'}")
    host = f"unix://{folder}/s.sock"
    script = (
        "umount /sys/fs/cgroup/unified 2>/dev/null; exec dockerd --storage-driver=vfs "
        '--iptables=false --ip6tables=false --bridge=none --data-root "$1/data" '
        '--exec-root "$1/exec" -p "$1/pid" -H "unix://$1/s.sock"'
    )
    with (folder / "log").open("wb") as log:
        popen = subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", str(folder)],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:

        def answers() -> bool:
            if popen.poll() is not None:
                raise NotTried(
                    f"dockerd ended: {(folder / 'log').read_text(encoding='utf-8')[-200:]}"
                )
            return _docker(host, "version").returncode == 0

        until(answers, "dockerd answers")
        yield host
    finally:
        popen.terminate()
        popen.wait(30)


def _docker(host: str, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["docker", "-H", host, *words], input=data, capture_output=True,
                          check=False)  # fmt: skip


BREAK_OUT = """
echo "key $(cat {home}/tls/* {home}/*/tls/* {home}/*/*.pem 2>/dev/null | cat)"
echo "users $(ls /root /home 2>/dev/null)"
echo "daemon $(ls {folder}/s.sock /var/run/docker.sock 2>/dev/null)"
echo "devices $(ls /dev/sda /dev/vda /dev/mem /dev/kmsg 2>/dev/null)"
echo "write $(touch {home}/evil /proc/sys/kernel/core_pattern 2>&1 && echo no)"
mount -t proc none /mnt 2>/dev/null && echo "mount yes" || echo "mount"
echo "END"
"""


@suite.attack(CONTAINER, quick=False)
def break_out_of_a_container(site: Site) -> str:
    """Ask for the machine's folders and rights, and then take what can be taken from inside."""
    folder = site.folder / "daemon"
    folder.mkdir()
    with _daemon(folder) as host:
        made = _docker(host, "import", "-", "curious:1", data=_archive())
        if made.returncode:
            raise RuntimeError(made.stderr.decode()[-200:])
        before = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = host
        try:
            home = _machine(site, "harbour", 'kinds = ["container"]\n')
            return _contained(site, home, folder)
        finally:
            os.environ.pop("DOCKER_HOST")
            if before is not None:
                os.environ["DOCKER_HOST"] = before


def _contained(site: Site, home: Path, folder: Path) -> str:
    head = '[job]\nname = "out"\nnodes = 1\non = ["harbour"]\n'
    script = BREAK_OUT.format(home=home, folder=folder)
    command = f"command = {json.dumps(['sh', '-c', script])}\n"
    launch = '[launch]\nlauncher = "container"\nimage = "curious:1"\nnetwork = "none"\n'
    refused = 0
    for mount in ("/:/host", f"{home}:/h", f"{folder}/s.sock:/s.sock", "/etc/../:/host"):
        try:
            job = site.operator.submit(f"{head}{command}{launch}mounts = {json.dumps([mount])}\n")
        except AtollError:
            refused += 1
            continue
        waiting = site.operator.job(job)["state"]
        site.operator.stop(job, grace_s=0.0)
        hold(waiting in ("waiting", "failed"), f"a mount of {mount} was taken: {waiting}")
        refused += 1
    job = site.operator.submit(head + command + launch)
    until(lambda: site.operator.job(job)["ended"], f"{job} ends", wait_s=2 * WAIT_S)
    lines = [str(line.get("text", line)).strip() for line in site.operator.logs(job)["lines"]]
    if not any("END" in line for line in lines):
        raise RuntimeError(f"the container did not run: {lines[-5:]}")
    plain = [line.rpartition("| ")[2] for line in lines]
    got = [line for line in plain if line.split(" ")[0] in ("key", "users", "daemon", "devices")
           and line.partition(" ")[2].strip()]  # fmt: skip
    hold(not got, f"the container saw {got}")
    hold("mount yes" not in plain, "the container could mount")
    hold(not (home / "evil").exists(), "the container wrote beside its folder")
    return f"{refused} mounts refused; keys, users, daemon, devices and mounts: nothing"
