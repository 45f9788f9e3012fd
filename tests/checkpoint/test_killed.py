"""kill -9 at every point of a save: there is always a valid checkpoint.

A child saves over an existing checkpoint and kills itself at the n-th point. The parent then
reads what is there, for every n until the child survives.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.checkpoint import SHARED, DirectoryStore

NAMES = {SHARED, "w0.safetensors"}

SAVE = """
import os, signal, sys, torch
from pathlib import Path
from atoll.checkpoint import DirectoryStore, Part, SavePoint

def save(folder, round_, step, keep, left=10**9):
    def moment(name):
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    store = DirectoryStore(folder, keep=keep, moment=moment)
    value = torch.full((9,), float(step))
    parts = [Part("shared.safetensors", {"model/v": value}), Part("w0.safetensors", {"v": value})]
    store.put(SavePoint(round_, step, "w0", ["w0"]), parts)
"""

CHILD = (
    SAVE
    + """
for line in sys.stdin:
    folder, round_, step, keep, left = line.split()
    child = os.fork()
    if child == 0:
        save(Path(folder), int(round_), int(step), int(keep), int(left))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked children")


class Saver:
    """A process whose children save, and die on the way."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def save(self, folder: Path, *, round_: int, step: int, keep: int, left: int = 10**9) -> int:
        """Save; return the exit status of the child, which dies after `left` points."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{folder} {round_} {step} {keep} {left}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Saver(process)
        assert process.stdin is not None
        process.stdin.close()


def read(folder: Path, *, keep: int) -> tuple[int, int]:
    """Return round and step of the newest checkpoint, after checking every part of it."""
    store = DirectoryStore(folder, keep=keep)
    manifest = store.verify(store.latest())
    parts = store.get(manifest.round, names=NAMES)
    for part in parts.values():
        for tensor in part.tensors.values():
            assert tensor.tolist() == [float(manifest.step)] * 9
    return manifest.round, manifest.step


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("round_", [2, 1], ids=["next round", "same round again"])
@pytest.mark.every(3)
def test_kill_at_any_point_of_a_save_leaves_a_valid_checkpoint(
    tmp_path: Path, saver: Saver, round_: int, keep: int
) -> None:
    before, after = (1, 1), (round_, 2)
    assert saver.save(tmp_path / "before", round_=1, step=1, keep=keep) == 0
    seen = []
    for point in range(100):
        folder = tmp_path / str(point)
        shutil.copytree(tmp_path / "before", folder)
        code = saver.save(folder, round_=round_, step=2, keep=keep, left=point)
        seen.append(read(folder, keep=keep))
        # Whatever the killed one left, saving goes on: the same again, then the next.
        assert saver.save(folder, round_=round_, step=2, keep=keep) == 0
        assert read(folder, keep=keep) == after
        assert saver.save(folder, round_=3, step=3, keep=keep) == 0
        assert read(folder, keep=keep) == (3, 3)
        litter = {path.name for path in (folder / "checkpoints").rglob("*replaced*")}
        assert not litter
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert set(seen) == {before, after}
    assert seen == sorted(seen)
    assert len(seen) > 12
