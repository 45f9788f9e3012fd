"""Steps that tests of a group at a real hub share."""

from __future__ import annotations

from atoll.hub.server import HubServer
from atoll.wire.messages import (
    Done,
    Launch,
    Lease,
    ProcessState,
    Recover,
    RoundJoin,
    RoundPlan,
    Sources,
    Standing,
    Verdict,
)
from atoll.wire.states import ProcessPhase
from tests.hub.membership import Running, launches, vote
from tests.hub.peer import Peer


def commit(group: Running, round_: int, *, leases: bool = False) -> Verdict:
    """Run one round with all members of a group."""
    joins = []
    for slot, peer in enumerate(group.members):
        lease = Lease(slot, {"data_pass": 0, "offset": 10 * (round_ + 1)}) if leases else None
        joins.append(peer.ask(RoundJoin(round_, f"base{round_}", lease=lease)))
    plans = [peer.answer(id) for peer, id in zip(group.members, joins, strict=True)]
    plan = plans[0]
    assert isinstance(plan, RoundPlan), plan
    ids = [peer.ask(vote(plan)) for peer in group.members]
    verdicts = [peer.answer(id) for peer, id in zip(group.members, ids, strict=True)]
    assert isinstance(verdicts[0], Verdict)
    assert verdicts[0].committed
    return verdicts[0]


def die(group: Running, name: str, *, code: int = -9, attempt: int = 1) -> Launch:
    """Report the end of a member's process; return the launch that replaces it."""
    report = ProcessState(group.job, name, ProcessPhase.EXITED, exit_code=code, attempt=attempt)
    assert isinstance(group.agent.request(report), Done)
    return launches(group.agent, 1)[name]


def ask_sources(peer: Peer, *failed: str) -> Sources:
    answer = peer.request(Recover(list(failed)))
    assert isinstance(answer, Sources), answer
    return answer


def stand(peer: Peer, round_: int, base: str) -> None:
    answer = peer.request(Standing(round_, base, ["w0"], 0.5, 1_000_000))
    assert isinstance(answer, Done), answer


def launches_of(hub: HubServer, job: str) -> Launch:
    """Return a launch of the only member with a token of its present attempt."""
    assert hub.hub is not None
    token = hub.call(hub.hub.stores.auth.issue_job_token(job, member="w0", attempt=2))
    return Launch(job, "w0", 0, token, "", attempt=2)
