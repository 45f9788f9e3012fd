"""A job of paths that is stopped and resumed trains on, however soon it is resumed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from atoll.hub.paths.service import RECORD_NAME
from atoll.hub.server import HubServer
from atoll.paths.ledger import PathRecord
from atoll.wire.messages import Done, Finished
from atoll.wire.part_check import Newest
from atoll.wire.paths import PathAsk, PathMeeting, PathReport, PathTrained, PathTurn
from tests.hub.membership import Running, job_of, launches, options, registered, until
from tests.hub.paths.test_paths_view import TABLES
from tests.hub.peer import Peer, member

HELD = {0: 0, 1: 0}


def ask(peer: Peer, body: PathAsk) -> PathTurn:
    turn = peer.request(body)
    assert isinstance(turn, PathTurn), turn
    return turn


def to_the_end(hub: HubServer, group: Running) -> None:
    """Train one phase, get the request to stop, and export."""
    (peer,) = group.members
    assert hub.hub is not None
    assert ask(peer, PathAsk(phases=5, process="a")).paths == [0, 1]
    hub.call(hub.hub.live.stop(group.job, grace_s=60.0))
    trained = [PathReport(path, 10, held_out=1.5, measured=10) for path in (0, 1)]
    assert peer.request(PathTrained(0, trained, HELD)) == PathMeeting(meet=True)
    assert ask(peer, PathAsk(1, phases=5, held=HELD, process="a")).last
    exported = [PathReport(path, 10, exported=True) for path in (0, 1)]
    peer.request(PathTrained(1, exported, HELD))
    over = ask(peer, PathAsk(1, phases=5, held=HELD, process="a"))
    assert over.over
    assert over.stopped
    assert isinstance(peer.request(Finished(True, {"stopped": True})), Done)
    until(lambda: job_of(hub, group.job).state == "stopped")


@pytest.mark.parametrize("look", [False, True], ids=["at-once", "seen-by-people"])
def test_a_resumed_job_is_not_over(hub: HubServer, look: bool) -> None:
    assert hub.hub is not None
    group = Running(hub, nodes=1, more=TABLES)
    to_the_end(hub, group)
    if look:
        assert hub.hub.live.paths(group.job) is not None
    hub.call(hub.hub.live.resume(group.job))
    (launch,) = launches(group.agent, 1).values()
    peer = member(hub, launch, incarnation="second")
    registered(peer)
    turn = ask(peer, PathAsk(phases=5, process="b"))
    assert not turn.over
    assert turn.paths == [0, 1]
    assert hub.hub.grouped.paths.ledger(group.job).best == {0: 1.5, 1: 1.5}
    for each in (peer, *group.members, group.agent):
        each.close()


def test_another_hub_resumes_what_the_first_one_left_as_over(tmp_path: Path) -> None:
    """The first one ended before it noticed that the job has."""
    with HubServer(options(tmp_path)) as hub:
        assert hub.hub is not None
        group = Running(hub, nodes=1, more=TABLES)
        to_the_end(hub, group)
        path = hub.hub.stores.jobs.folder(group.job) / RECORD_NAME
        assert msgspec.json.decode(path.read_bytes(), type=PathRecord).over
        for each in (*group.members, group.agent):
            each.close()
    with HubServer(options(tmp_path)) as hub:
        assert hub.hub is not None
        hub.call(hub.hub.live.resume(group.job))
        record = msgspec.json.decode(path.read_bytes(), type=PathRecord)
        assert not record.over
        assert not record.dealt
        assert record.best == {0: 1.5, 1: 1.5}


def test_waiting_request_does_not_bring_an_old_checkpoint_back(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint becomes complete while one member waits; another one asks after it."""
    assert hub.hub is not None
    group, newest = Running(hub, nodes=2, more=TABLES), [Newest(-1)]

    async def look(job: str, rounds: list[int] | None = None) -> Newest:
        return newest[0]

    monkeypatch.setattr(hub.hub.checkpoints, "newest", look)
    first, second = group.members
    waiting = first.ask(PathAsk(phases=5, process="a"))
    ledger = hub.hub.grouped.paths.ledger(group.job)
    until(lambda: ledger.waiting == {"w0"}, "the first request")
    newest[0] = Newest(8)
    assert ask(second, PathAsk(phases=5, process="b")).checkpoint == 8
    assert isinstance(first.answer(waiting), PathTurn)
    assert ledger.checkpoint == 8
    group.close()
