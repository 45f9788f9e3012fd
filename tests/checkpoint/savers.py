"""Savers under observation, and a writer that can be killed at any point."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from atoll.checkpoint import (
    SHARED,
    BackgroundSaver,
    DirectoryStore,
    FolderTarget,
    Part,
    Saved,
    SavePoint,
)
from atoll.checkpoint.background.background import Skipped
from atoll.checkpoint.format.part import STATE
from atoll.wire.messages import Event
from tests.patience import PATIENCE_S

NAMES = {SHARED, "w0.safetensors"}
WAIT_S = PATIENCE_S

WRITER = """
import os, signal, sys
from pathlib import Path
from atoll.checkpoint.background.child import lower_priority
from atoll.checkpoint.background.writer import run

mark, left, whom = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def moment(name):
    global left
    left -= 1
    if left < 0 and not mark.exists():
        mark.write_text(name)
        os.kill(os.getpid() if whom == "writer" else os.getppid(), signal.SIGKILL)
        signal.pause()

run(*lower_priority(), moment=moment)
"""


def killing(mark: Path, left: int, *, whom: str = "writer") -> list[str]:
    """Return a writer's command that kills itself, or its trainer, once, after `left` points."""
    return [sys.executable, "-c", WRITER, str(mark), str(left), whom]


class Events:
    """Collects what a saver reports."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.all.append(event)
            self._changed.notify_all()

    def kinds(self) -> list[str]:
        with self._changed:
            return [event.kind for event in self.all]

    def until(self, kind: str, *, count: int = 1) -> Event:
        """Wait for an event and return it."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.kinds_now().count(kind) >= count, timeout=WAIT_S
            ), self.all
            return [event for event in self.all if event.kind == kind][count - 1]

    def kinds_now(self) -> list[str]:
        return [event.kind for event in self.all]


def parts(
    value: float, *, elements: int = 9, member: str = "w0", base: str = ""
) -> tuple[Part, Part]:
    """Return the own and the shared part of a member; every number in them is `value`."""
    state = {STATE: base} if base else {}
    return (
        Part(f"{member}.safetensors", {"v": torch.full((elements,), value)}, state),
        Part(SHARED, {"model/v": torch.full((elements,), value)}, state),
    )


def save(
    saver: BackgroundSaver,
    round_: int,
    *,
    elements: int = 9,
    final: bool = False,
    score: float | None = None,
    member: str = "w0",
    members: Sequence[str] = ("w0",),
    base: str = "",
) -> Saved | Skipped:
    """Save a state whose numbers are the round's."""
    own, common = parts(
        float(round_), elements=elements, member=member, base=base or f"base {round_}"
    )
    point = SavePoint(round_, 10 * round_, member, members, score)
    return saver.save(point, [own, common] if point.shared else [own], final=final)


def until_written(saver: BackgroundSaver) -> None:
    """Wait until all that was saved is written, whatever becomes of its copies elsewhere."""
    deadline = time.monotonic() + WAIT_S
    while not saver.wait(0.1):  # it also waits for the copies, as long as it may
        assert time.monotonic() < deadline


def target(folder: Path, *, keep: int = 2, to: str = "") -> FolderTarget:
    return FolderTarget(folder=str(folder / "job"), keep=keep, to=to)


def newest(folder: Path) -> int:
    """Return the newest round after checking every byte of it; -1: there is none."""
    store = DirectoryStore(folder / "job")
    round_ = store.latest()
    if round_ < 0:
        return round_
    manifest = store.verify(round_)
    assert manifest.step == 10 * round_
    for part in store.get(round_, names=NAMES).values():
        for tensor in part.tensors.values():
            assert set(tensor.tolist()) == {float(round_)}
    return round_
