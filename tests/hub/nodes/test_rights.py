"""A member's token speaks for its own process, not for those of other members."""

from __future__ import annotations

from atoll.wire.messages import Acked, Failure, Leaving, LogLines, ProcessState
from atoll.wire.states import ProcessPhase
from tests.hub.membership import Running, job_of, until


def test_member_reports_neither_exit_nor_output_of_another(running: Running) -> None:
    w0, _ = running.members
    for body in (
        ProcessState(running.job, "w1", ProcessPhase.EXITED, exit_code=1, attempt=1),
        LogLines(running.job, "w1", 1, ["made up"]),
    ):
        answer = w0.request(body)
        assert isinstance(answer, Failure), answer
        assert "belongs to another" in answer.error["what"]
    assert job_of(running.hub, running.job).members["w1"].live
    assert w0.request(LogLines(running.job, "w0", 1, ["its own"])) == Acked(1)


def test_no_lock_of_a_job_stays(running: Running) -> None:
    assert running.hub.hub is not None
    running.members[0].request(Leaving("test"))
    until(lambda: not len(running.hub.hub.membership._locks))  # type: ignore[union-attr]
