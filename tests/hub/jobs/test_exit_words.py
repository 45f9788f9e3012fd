"""What an event says of a process that ended: its machine, the signal, the cause."""

from __future__ import annotations

from atoll.hub.jobs.members import describe_exit
from atoll.hub.jobs.record import Member


def test_killed_process_is_named_by_machine_and_signal() -> None:
    killed = Member(member="w2", slot=2, node="lap3")
    killed.error = {"what": "w2 was killed", "given": "signal 9 (SIGKILL)"}
    assert describe_exit(killed, -9) == "lap3's worker was killed (SIGKILL)"
    killed.error = {"what": "w2 ran out of memory", "given": "the system killed it"}
    assert describe_exit(killed, -9) == (
        "lap3's worker was killed (SIGKILL): w2 ran out of memory: the system killed it"
    )
    killed.error = None
    assert describe_exit(killed, 3) == "lap3's worker ended with exit status 3"
    assert describe_exit(killed, -99) == "lap3's worker was killed (signal 99)"
