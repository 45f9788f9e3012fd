"""kill -9 at every point of a save: the checkpoint before is always valid.

A child saves round 2 over an existing round 1 and kills itself at the n-th point. The parent then
reads what is there, for every n until the child survives.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atoll.checkpoint import SHARED, DirectoryStore, Part

NAMES = {SHARED, "w0.safetensors"}

CHILD = """
import os, signal, sys, torch
from pathlib import Path
from atoll.checkpoint import DirectoryStore, Part
folder, round_, keep = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for line in sys.stdin:
    path, last = line.split()
    left = [int(last)]
    def moment(name):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if child == 0:
        store = DirectoryStore(folder / path, keep=keep, moment=moment)
        parts = [Part("shared.safetensors", {"model/v": torch.full((9,), float(round_))}),
                 Part("w0.safetensors", {"v": torch.full((9,), float(round_))})]
        store.put(round_, parts, step=round_, member="w0", members=["w0"])
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def put(store: DirectoryStore, round_: int) -> None:
    parts = [
        Part(SHARED, {"model/v": torch.full((9,), float(round_))}),
        Part("w0.safetensors", {"v": torch.full((9,), float(round_))}),
    ]
    store.put(round_, parts, step=round_, member="w0", members=["w0"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked children")
@pytest.mark.parametrize("keep", [1, 2])
def test_kill_at_any_point_of_a_save_leaves_a_valid_checkpoint(tmp_path: Path, keep: int) -> None:
    put(DirectoryStore(tmp_path / "before", keep=keep), 1)
    latest = []
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), "2", str(keep)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as children:
        assert children.stdin is not None
        assert children.stdout is not None
        for point in range(100):
            shutil.copytree(tmp_path / "before", tmp_path / str(point))
            children.stdin.write(f"{point} {point}\n")
            children.stdin.flush()
            code = int(children.stdout.readline())
            store = DirectoryStore(tmp_path / str(point), keep=keep)
            found = store.latest()
            parts = store.get(found, names=NAMES)
            assert parts["w0.safetensors"].tensors["v"].tolist() == [float(found)] * 9
            latest.append(found)
            # The next save succeeds whatever the killed one left.
            put(store, 3)
            assert store.latest() == 3
            store.verify(3)
            if code == 0:
                break
            assert code == -signal.SIGKILL
        children.stdin.close()
    assert latest == sorted(latest)
    assert set(latest) == {1, 2}
    assert len(latest) > 12
