"""Every question to the ledger becomes an event, whatever came of it."""

from __future__ import annotations

import queue

import pytest

from atoll.errors import AtollError, DeadlineExceeded, HubUnreachable, JobError
from atoll.train.swarm.asking import Asking
from atoll.train.swarm.parts import Answer
from atoll.wire.message import Message
from atoll.wire.swarm import SwarmAnnounce
from tests.patience import PATIENCE_S


@pytest.mark.parametrize("kind", [DeadlineExceeded, HubUnreachable, JobError])
def test_a_question_that_fails_can_be_asked_again(kind: type[AtollError]) -> None:
    def ask(body: Message, *, timeout_s: float) -> Message:
        raise kind("no answer")

    events: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    asking = Asking("w0", ask, event=events.put, most=1)
    asking.ask(SwarmAnnounce())
    event = events.get(timeout=PATIENCE_S)
    assert event.answer is None
    asking.answered(event)
    assert not asking.waits(SwarmAnnounce)
    asking.close()
