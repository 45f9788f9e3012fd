"""One file knows what only some systems have."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from atoll import system
from atoll.system import flush_folder, try_lock
from tests.patience import PATIENCE_S

PACKAGE = Path(__file__).resolve().parent.parent / "atoll"
MODULES = r"(?:import|from) (?:fcntl|msvcrt|termios|tty|pty|grp|pwd|resource|syslog)\b"
NAMES = (
    r"killpg|getpg\w+|setsid|start_new_session|creationflags|CREATE_\w+|prctl|PR_SET_\w+|os\.fork|"
    r"gete?[ug]id|sched_[gs]et\w+|os\.nice|AF_UNIX|SIGHUP|SIGBREAK"
)
ONLY_THERE = re.compile(rf"{MODULES}|\b(?:{NAMES})\b|signal\.SIGKILL|\"/proc/")

ONLY_LINUX = (PACKAGE / "system.py", PACKAGE / "netlab")
"""The network lab is refused in words elsewhere; it can be imported."""


def test_what_only_some_systems_have_is_in_one_file() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in ONLY_THERE.findall(path.read_text(encoding="utf-8"))
        if path not in ONLY_LINUX and path.parent not in ONLY_LINUX
    ]
    assert not found


def test_a_child_apart_leads_a_group_and_keeps_its_limits() -> None:
    if os.name != "posix":
        pytest.skip("Windows has neither groups nor these limits")
    cpu = system.usable_cpus()[-1]
    source = """
import os
print(os.getpid() == os.getpgid(0) == os.getsid(0), os.nice(0))
if hasattr(os, "sched_getaffinity"):
    print(*os.sched_getaffinity(0), open("/proc/self/oom_score_adj").read())
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        preexec_fn=system.before_program(niceness=3, cpus=[cpu], oom_score=900),
        stdout=subprocess.PIPE, timeout=PATIENCE_S, check=True, **system.apart(),
    )  # fmt: skip
    apart, nice, *limits = done.stdout.split()
    assert (apart, int(nice)) == (b"True", min(19, os.nice(0) + 3))
    if sys.platform == "linux":
        assert [int(limit) for limit in limits] == [cpu, 900]


def test_what_the_kernel_says_of_a_process_is_read_or_unknown() -> None:
    assert system.count_oom_kills() >= 0
    assert system.proportional_bytes(2**30) is None
    assert system.control_group(2**30) == ""
    if sys.platform == "linux":
        assert (system.resident_bytes() or 0) > 2**20
        assert (system.proportional_bytes(os.getpid()) or 0) > 2**20


@pytest.mark.parametrize(
    ("groups", "path"),
    [
        ("4:cpu,memory:/user/a\n0::/\n", "sys/fs/cgroup/memory/user/a/memory.oom_control"),
        ("0::/user.slice/a\n", "sys/fs/cgroup/user.slice/a/memory.events.local"),
        ("0::/docker/seen-from-outside\n", "sys/fs/cgroup/memory.events.local"),
        ("", "proc/vmstat"),
    ],
)
def test_kills_are_counted_of_the_own_group(tmp_path: Path, groups: str, path: str) -> None:
    """Those of the machine count only where the group has no count of its own."""
    for name, kills in (("proc/vmstat", 7), (path, 3)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"low 1\noom_kill_disable 0\noom_kill %d\n" % kills)
    assert system.count_oom_kills(groups, root=tmp_path) == 3
    (tmp_path / path).unlink()
    assert system.count_oom_kills(groups, root=tmp_path) == (0 if path == "proc/vmstat" else 7)


def test_a_local_socket_answers_or_there_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "door")
    with pytest.raises(OSError, match=r"No such file|local sockets"):
        system.try_local_socket(path)
    if hasattr(socket, "AF_UNIX"):
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            system.try_local_socket(path)


def test_a_lock_excludes_others_and_a_shared_one_does_not(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as other:
        try_lock(one.fileno(), shared=True)
        try_lock(other.fileno(), shared=True)
        with pytest.raises(OSError, match=r"unavailable|denied"):
            try_lock(other.fileno(), shared=False)


def test_a_folder_that_is_not_there_is_no_silent_success(tmp_path: Path) -> None:
    flush_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        flush_folder(tmp_path / "none")
