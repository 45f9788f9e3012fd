"""`python -m atoll.train.verification.child`: compute steps of other members again.

    child JOBFILE SLOTS NICENESS

Reads names of folders from its standard input, one per line, and does one task after the other. A
folder has the task (`task.json`), the state at the opening and, for a judge, the state before its
step. It gets `answer.json`, and `handed.state` if the task asks for a state; then a line is written
to standard output. A process of its own, because random numbers and threads are one per process,
and because it gives way to training.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path

import msgspec

from atoll import system
from atoll.config import load_spec
from atoll.errors import AtollError
from atoll.train.verification.kept_state import KeptState
from atoll.train.verification.recomputation import Recomputation
from atoll.verification.challenge import Stage
from atoll.wire.messages import VerificationAnswer, VerificationTask
from atoll.wire.round_messages import MOST_REASON

TASK, ANSWER = "task.json", "answer.json"
OPENING, BEFORE, HANDED = "opening.state", "before.state", "handed.state"


def main(arguments: list[str]) -> int:
    """Do tasks until standard input ends; return the exit status."""
    system.end_with_parent()
    system.lower_priority(int(arguments[2]))
    # Whatever a model or a library prints must not be taken for the end of a task.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    spec, slots = load_spec(Path(arguments[0])), int(arguments[1])
    built: Recomputation | None = None
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        task = msgspec.json.decode((folder / TASK).read_bytes(), type=VerificationTask)
        try:
            built = built or Recomputation(spec, num_slots=slots)
            answer = _done(built, task, folder)
        except AtollError as error:
            answer = VerificationAnswer(
                challenge=task.challenge, kind=task.kind, failed=str(error)[:MOST_REASON]
            )
        (folder / ANSWER).write_bytes(msgspec.json.encode(answer))
        replies.write(b"\n")
    return 0


def _done(built: Recomputation, task: VerificationTask, folder: Path) -> VerificationAnswer:
    """Do a task; return the answer."""
    opening = KeptState.read(folder / OPENING)
    later = task.kind == Stage.JUDGE and task.first > 0
    state = KeptState.read(folder / BEFORE) if later else opening
    found = built.run(task, state, start=opening.model)
    if found.state is not None:
        found.state.write(folder / HANDED)
    return found.answer


if __name__ == "__main__":
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING)
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
