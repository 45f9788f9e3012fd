"""kill -9 of the writer, or of the trainer, at every point of a background save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.checkpoint import BackgroundSaver, DirectoryStore, Saved, SavePoint
from tests.checkpoint.savers import WAIT_S, Events, killing, newest, parts, save, target
from tests.tiers import sampled

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes")

TRAINERS = """
import os, signal, sys
from pathlib import Path
from atoll.checkpoint import BackgroundSaver
from tests.checkpoint.savers import killing, save, target

def train(folder, left, whom):
    count = int(left)
    def moment(name):
        nonlocal count
        count -= 1
        if whom == "self" and count < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    writers = int(left) if whom == "writer" else 10**9
    saver = BackgroundSaver(
        target(folder), scratch=folder / "scratch", moment=moment,
        command=killing(folder / "mark", writers, whom="trainer"),
    )
    save(saver, 2)
    saver.wait(60)
    (folder / "pid").write_text(str(saver.writer_pid))
    save(saver, 3, final=True)
    saver.close(20)

for line in sys.stdin:
    folder, left, whom = line.split()
    child = os.fork()
    if child == 0:
        train(Path(folder), left, whom)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.long(
    "tests/checkpoint/background/test_background_killed.py"
    "::test_kill_of_the_writer_at_some_points_loses_nothing"
)
def test_kill_of_the_writer_at_any_point_loses_nothing(tmp_path: Path) -> None:
    seen = kill_the_writer(tmp_path, range(60))
    assert len(seen) >= 20
    assert {"manifest.json written", "manifest.json renamed", "written"} <= set(seen)


def test_kill_of_the_writer_at_some_points_loses_nothing(tmp_path: Path) -> None:
    assert kill_the_writer(tmp_path, range(1, 14, 6)) == [
        "w0.safetensors written", "shared.safetensors flushed", "manifest.json renamed"
    ]  # fmt: skip


def kill_the_writer(tmp_path: Path, points: range) -> list[str]:
    """Kill it at each of these points, as far as there are so many; return their names."""
    seen = []
    for point in points:
        folder = tmp_path / str(point)
        store = DirectoryStore(folder / "job")
        store.put(SavePoint(1, 10, "w0", ["w0"]), parts(1.0))
        events = Events()
        saver = BackgroundSaver(
            target(folder, keep=1), scratch=folder, on_event=events,
            command=killing(folder / "mark", point),
        )  # fmt: skip
        assert isinstance(save(saver, 2), Saved)
        assert saver.wait(WAIT_S)
        assert newest(folder) == 2
        save(saver, 3)
        assert saver.close(WAIT_S)
        assert newest(folder) == 3
        assert [path.name for path in (folder / "job/checkpoints").iterdir()] == ["round-000003"]
        if not (folder / "mark").exists():
            break
        assert events.kinds() == ["checkpoint-writer-restarted"]
        seen.append((folder / "mark").read_text())
    return seen


@pytest.fixture(scope="module")
def trainers() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", TRAINERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def train(trainers: subprocess.Popen[str], folder: Path, *, left: int, whom: str) -> int:
    """Train in a forked child that dies after `left` points; return its exit status."""
    assert trainers.stdin is not None
    assert trainers.stdout is not None
    folder.mkdir()
    trainers.stdin.write(f"{folder} {left} {whom}\n")
    trainers.stdin.flush()
    return int(trainers.stdout.readline())


def shared_memory() -> set[str]:
    """Return the names of this project in shared memory; other tests run meanwhile."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if "atoll" in name}


def until_gone(folder: Path) -> None:
    """Wait until no writer of that folder lives."""
    deadline = time.monotonic() + WAIT_S
    while any(
        str(folder) in " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["cmdline"])
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("whom", "points", "step"),
    sampled(
        [("writer", 12, 3), ("writer", 12, 1), ("self", 5, 1)],
        lambda case: case[2] > 1,
        "tests/checkpoint/background/test_background_killed.py"
        "::test_killed_trainer_leaves_a_valid_checkpoint",
    ),
)
def test_killed_trainer_leaves_a_valid_checkpoint(
    tmp_path: Path, trainers: subprocess.Popen[str], whom: str, points: int, step: int
) -> None:
    shared = shared_memory()
    found = []
    for point in range(0, 80, step):
        folder = tmp_path / f"{whom}{point}"
        code = train(trainers, folder, left=point, whom=whom)
        until_gone(folder)
        found.append(newest(folder))
        successor = BackgroundSaver(target(folder), scratch=folder / "scratch")
        save(successor, 4)
        assert successor.close(WAIT_S)
        assert newest(folder) == 4
        assert list((folder / "scratch").glob("*")) == []
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert found == sorted(found)
    assert set(found) == {-1, 2, 3}
    assert len(found) * step > points
    assert shared_memory() <= shared
