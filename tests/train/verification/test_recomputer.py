"""The process that computes again: kept for many tasks, abandoned, replaced when it ends."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.train.verification.recomputer import Recomputer
from atoll.wire.messages import VerificationAnswer, VerificationTask
from tests.patience import PATIENCE_S

CHILD = """
import json, os, pathlib, sys
for line in sys.stdin:
    folder = pathlib.Path(line.strip())
    if (folder / "die").exists():
        sys.exit(7)
    while (folder / "wait").exists():
        pass
    answer = {"challenge": 1, "kind": "replay", "digests": [str(os.getpid())]}
    (folder / "answer.json").write_text(json.dumps(answer))
    print(flush=True)
"""
"""Answers with its own number; it does not load torch, so that this takes milliseconds."""


class Lane:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: queue.SimpleQueue[VerificationAnswer | None] = queue.SimpleQueue()
        self.recomputer = Recomputer("test", [sys.executable, "-c", CHILD], do=self._do)

    def _do(self, lane: Recomputer, task: VerificationTask) -> None:
        self.answers.put(lane.answer(task, self.folder))

    def give(self, task: VerificationTask) -> None:
        while not self.recomputer.give(task):  # its thread is about to note that it is free
            pass

    def answer(self, number: int = 1) -> VerificationAnswer:
        self.give(task(number))
        found = self.answers.get(timeout=PATIENCE_S)
        assert found is not None
        return found


def task(number: int) -> VerificationTask:
    return VerificationTask(challenge=number, kind="replay", member="w1", round=3)


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    found = Lane(tmp_path)
    yield found
    found.recomputer.close()


def test_one_process_does_many_tasks(lane: Lane) -> None:
    first = lane.answer(1)
    assert lane.answer(2).digests == first.digests
    (process,) = first.digests
    assert psutil.Process(int(process)).ppid() == psutil.Process().pid


def test_process_that_ends_gives_a_failed_answer_and_another_one(lane: Lane) -> None:
    first = lane.answer(1)
    (lane.folder / "die").touch()
    failed = lane.answer(2)
    assert (failed.challenge, failed.kind) == (2, "replay")
    assert "ended with status 7" in failed.failed
    (lane.folder / "die").unlink()
    assert lane.answer(3).digests != first.digests


def test_what_no_member_waits_for_is_abandoned(lane: Lane) -> None:
    lane.answer(1)
    (lane.folder / "wait").touch()
    lane.give(task(2))
    lane.recomputer.keep([task(2), task(3)])
    assert lane.answers.empty()
    lane.recomputer.keep([task(3)])
    assert lane.answers.get(timeout=PATIENCE_S) is None
    (lane.folder / "wait").unlink()
    assert not lane.answer(3).failed


def test_nothing_is_left_after_the_end(lane: Lane) -> None:
    (process,) = lane.answer(1).digests
    (lane.folder / "wait").touch()
    lane.give(task(2))
    lane.recomputer.close()
    assert not psutil.pid_exists(int(process))
    assert not lane.recomputer.give(task(3))
