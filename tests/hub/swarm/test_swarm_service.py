"""Members of a SWARM at a real hub over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import msgspec
import pytest

from atoll.hub.server import HubServer
from atoll.rounds import timing
from atoll.swarm.ledger import Ledger
from atoll.wire.messages import (
    Done,
    Failure,
    Finished,
    Leaving,
    RoundJoin,
    RoundPlan,
    SwarmAnnounce,
    SwarmDone,
    SwarmLeases,
    SwarmNews,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
    Verdict,
)
from atoll.wire.swarm import Holder, Share
from tests.hub.membership import Running, event_texts, job_of, until, vote
from tests.hub.peer import Peer
from tests.patience import PATIENCE_S

TABLES = """
[strategy]
preset = "ddp"
inner = "swarm"
[swarm]
stages = 2
microbatches = 2
"""


@pytest.fixture
def swarm(hub: HubServer) -> Iterator[Running]:
    """A job of two stages, one for each of its two members."""
    group = Running(hub, more=TABLES)
    yield group
    group.close()


def ledger_of(swarm: Running) -> Ledger:
    assert swarm.hub.hub is not None
    return swarm.hub.hub.grouped.swarm.ledger(swarm.job)


def announced(peer: Peer, body: SwarmAnnounce) -> SwarmPlace:
    place = peer.request(body)
    assert isinstance(place, SwarmPlace), place
    return place


def ready(peer: Peer) -> SwarmPlace:
    place = announced(peer, SwarmAnnounce(dial=["10.0.0.1:7"]))
    body = SwarmAnnounce(
        epoch=place.epoch, stage=place.stage, step=place.step, history=place.history
    )
    place = announced(peer, body)
    assert place.ready
    return place


def news(peer: Peer, body: SwarmWatch) -> SwarmNews:
    answer = peer.request(body)
    assert isinstance(answer, SwarmNews), answer
    return answer


def test_a_microbatch_is_leased_counted_and_announced(swarm: Running) -> None:
    first, second = swarm.members
    driver = ready(first)
    waiting = first.ask(SwarmWant(driver.epoch, room=1))
    other = ready(second)
    answer = first.answer(waiting)  # leased once every stage has a member
    assert isinstance(answer, SwarmLeases)
    (lease,) = answer.leases
    assert (lease.step, lease.index, lease.stages) == (0, 0, [0, 1])
    table = news(second, SwarmWatch(other.epoch, 0)).table
    watching = second.ask(SwarmWatch(other.epoch, 0, table=table))
    holders = [Holder("w0", driver.epoch), Holder("w1", other.epoch)]
    done = SwarmDone(0, lease.index, lease.lease, lease.stages, holders)
    assert isinstance(first.request(done), Done)
    told_by_hub = second.answer(watching)
    assert isinstance(told_by_hub, SwarmNews)
    assert told_by_hub.shares == [Share(lease.index, lease.lease, "w1")]


def test_the_table_names_peers_and_where_they_listen(swarm: Running) -> None:
    places = [ready(peer) for peer in swarm.members]
    peers = news(swarm.members[0], SwarmWatch(places[0].epoch, 0)).peers
    assert {(peer.member, peer.stage) for peer in peers} == {("w0", 0), ("w1", 1)}
    assert peers[0].dial == ["10.0.0.1:7"]


def test_a_member_that_leaves_takes_its_stage_along(swarm: Running) -> None:
    first, second = swarm.members
    place, _ = ready(first), ready(second)
    assert isinstance(second.request(Leaving("preempted")), Done)
    until(lambda: "no member serves stage 1" in ledger_of(swarm).paused())
    until(lambda: any("stage 1" in text for text in event_texts(swarm.hub, swarm.job, "paused")))
    answer = news(first, SwarmWatch(place.epoch, 0))
    assert [peer.member for peer in answer.peers] == ["w0"]
    assert "stage 1" in answer.paused


def test_a_lost_ledger_is_rebuilt_from_its_members(swarm: Running) -> None:
    places = [ready(peer) for peer in swarm.members]
    assert swarm.hub.hub is not None
    swarm.hub.hub.grouped.swarm._runtimes.clear()  # all that a restart of the hub loses
    share = Share(1, places[0].epoch + 5, "w0")
    body = SwarmAnnounce(epoch=places[0].epoch, stage=0, step=3, folded=[share])
    new = announced(swarm.members[0], body)
    assert (new.stage, new.keep) == (-1, True)
    again = announced(swarm.members[0], msgspec.structs.replace(body, ledger=new.ledger))
    assert (again.epoch, again.step, again.ready, again.keep) == (places[0].epoch, 3, True, True)
    other = SwarmAnnounce(epoch=places[1].epoch, stage=1, step=3, ledger=new.ledger)
    assert announced(swarm.members[1], other).keep
    leases = swarm.members[0].request(SwarmWant(again.epoch, room=9))
    assert isinstance(leases, SwarmLeases)
    assert [(x.index, x.stages) for x in leases.leases] == [(0, [0, 1]), (1, [1])]
    assert min(x.lease for x in leases.leases) > share.lease


def test_stages_meet_in_rounds_of_their_own(swarm: Running) -> None:
    places = [ready(peer) for peer in swarm.members]
    early = swarm.members[0].request(RoundJoin(0, "stage0"))
    assert isinstance(early, Failure)
    assert "do not meet for this closing" in early.error["what"]
    leases = swarm.members[0].request(SwarmWant(places[0].epoch, room=2))
    assert isinstance(leases, SwarmLeases)
    holders = [Holder(f"w{n}", place.epoch) for n, place in enumerate(places)]
    for lease in leases.leases:
        body = SwarmDone(0, lease.index, lease.lease, lease.stages, holders)
        assert isinstance(swarm.members[0].request(body), Done)
    epochs = []
    for stage, (peer, place) in enumerate(zip(swarm.members, places, strict=True)):
        closing = news(peer, SwarmWatch(place.epoch, 0)).closing
        plan = peer.request(RoundJoin(0, f"stage{stage}", closing=closing))
        assert isinstance(plan, RoundPlan), plan
        assert (plan.group, plan.round, plan.members) == (stage, 0, [f"w{stage}"])
        assert ledger_of(swarm).step == 0
        verdict = peer.request(vote(plan))
        assert isinstance(verdict, Verdict)
        assert verdict.committed
        epochs.append(plan.epoch)
    assert len(set(epochs)) == 2
    assert ledger_of(swarm).step == 1
    assert news(swarm.members[0], SwarmWatch(places[0].epoch, 0)).step == 1


MIXED = TABLES.replace('"ddp"', '"diloco"').replace("stages = 2", "stages = 2\nwhole = 1")


@pytest.fixture
def mixed(hub: HubServer) -> Iterator[Running]:
    """A job of two stages, one for each of its last two members; the first has the whole model."""
    group = Running(hub, nodes=3, more=MIXED)
    yield group
    group.close()


def test_a_member_with_the_whole_model_meets_every_stage(mixed: Running) -> None:
    whole, *stages = mixed.members
    for peer in stages:
        ready(peer)
    for stage, peer in enumerate(stages):
        waiting = whole.ask(RoundJoin(0, "base", group=stage))
        plan = peer.request(RoundJoin(0, "base"))
        assert isinstance(plan, RoundPlan), plan
        assert (plan.group, plan.round, plan.members) == (stage, 0, ["w0", f"w{stage + 1}"])
        assert whole.answer(waiting) == plan
        voting = whole.ask(vote(plan))
        verdict = peer.request(vote(plan))
        assert isinstance(verdict, Verdict)
        assert verdict.committed
        assert whole.answer(voting) == verdict
    astray = stages[0].request(RoundJoin(1, "base", group=1))
    assert isinstance(astray, Failure)
    assert "no place in a round" in astray.error["what"]


def test_a_whole_member_may_be_there_before_all_others(mixed: Running) -> None:
    whole, *stages = mixed.members
    waiting = whole.ask(RoundJoin(0, "base", group=0))
    assert mixed.hub.hub is not None
    (first, *_) = mixed.hub.hub.rounds.runtimes.of(mixed.job)
    until(lambda: "w0" in first.machine.joins)
    assert mixed.hub.hub.grouped.swarm.view(mixed.job) is None  # no member has announced itself
    for peer in stages:
        ready(peer)
    plan = stages[0].request(RoundJoin(0, "base"))
    assert isinstance(plan, RoundPlan), plan
    assert plan.members == ["w0", "w1"]
    assert whole.answer(waiting) == plan


def test_all_groups_end_with_the_same_round(mixed: Running) -> None:
    """A stop between the rounds of two stages makes only the rounds after them the last ones."""
    whole, *stages = mixed.members
    for peer in stages:
        ready(peer)

    def meet(stage: int, number: int) -> RoundPlan:
        waiting = whole.ask(RoundJoin(number, "base", group=stage))
        plan = stages[stage].request(RoundJoin(number, "base"))
        assert isinstance(plan, RoundPlan), plan
        whole.answer(waiting)
        voting = whole.ask(vote(plan))
        stages[stage].request(vote(plan))
        whole.answer(voting)
        return plan

    assert not meet(0, 0).stopping
    assert mixed.hub.hub is not None
    mixed.hub.call(mixed.hub.hub.live.stop(mixed.job, grace_s=60.0))
    ledger = ledger_of(mixed)
    until(lambda: ledger.saves.stopping)
    assert not meet(1, 0).stopping
    ledger.begin(1)
    assert [meet(stage, 1).stopping for stage in range(2)] == [True, True]


def test_a_whole_member_follows_the_stages_pace_and_end(mixed: Running) -> None:
    whole, *stages = mixed.members
    for peer in stages:
        ready(peer)
    waiting = whole.ask(RoundJoin(0, "base", group=0, steps=4, busy_s=1.0))
    plan = stages[0].request(RoundJoin(0, "base", steps=4, busy_s=2.0))
    assert isinstance(plan, RoundPlan), plan
    whole.answer(waiting)
    voting = whole.ask(vote(plan))
    stages[0].request(vote(plan))
    verdict = whole.answer(voting)
    assert isinstance(verdict, Verdict)
    assert verdict.pace == {"w0": 2.0}
    ledger = ledger_of(mixed)
    ledger.begin(ledger.settings.steps)
    ledger.saves.complete(ledger.step, 0)
    alone = whole.ask(RoundJoin(1, "base", group=0))
    for peer in stages:
        assert isinstance(peer.request(Leaving("it is done")), Done)
    refused = whole.answer(alone)
    assert isinstance(refused, Failure)
    assert refused.error["kind"] == "LeftBehind"
    place = announced(whole, SwarmAnnounce(stage=0))
    assert (place.finished, place.step, place.round) == (True, ledger.step, 1)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_job_ends_with_a_whole_member_that_was_late(
    mixed: Running, restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages' last round went on without it: it reports their model after they have ended."""
    whole, *stages = mixed.members
    for peer in stages:
        ready(peer)
    for stage, peer in enumerate(stages):
        waiting = whole.ask(RoundJoin(0, "base", group=stage))
        plan = peer.request(RoundJoin(0, "base"))
        assert isinstance(plan, RoundPlan), plan
        whole.answer(waiting)
        voting = whole.ask(vote(plan))
        peer.request(vote(plan))
        whole.answer(voting)
    monkeypatch.setattr(timing, "MIN_GRACE_S", 0.1)  # from now on only the late one is waited for
    for peer in stages:
        plan = peer.request(RoundJoin(1, "base"))
        assert isinstance(plan, RoundPlan), plan
        assert "w0" not in plan.members
        peer.request(vote(plan))
    ledger = ledger_of(mixed)
    ledger.begin(ledger.settings.steps)
    ledger.saves.complete(ledger.step, 0)
    for peer in stages:
        peer.request(Finished(True))
    assert mixed.hub.hub is not None
    mixed.hub.call(mixed.hub.hub.scheduler.review(mixed.job))
    assert job_of(mixed.hub, mixed.job).state == "running", "it has not reported its result yet"
    saved = ledger.step
    if restarted:
        mixed.hub.hub.grouped.swarm._runtimes.clear()  # all that a restart of the hub loses
        saved = -1  # no member has saved a checkpoint here
    refused = whole.request(RoundJoin(2, "base", group=0))
    assert isinstance(refused, Failure)
    assert refused.error["kind"] == "LeftBehind"
    place = announced(whole, SwarmAnnounce(stage=0))
    assert (place.finished, place.step) == (True, saved)
    whole.request(Finished(True, {"loss_final": 1.0}))
    until(lambda: job_of(mixed.hub, mixed.job).state == "done")
    assert job_of(mixed.hub, mixed.job).members["w0"].result == {"loss_final": 1.0}


def test_stages_meet_without_a_lost_whole_member(mixed: Running) -> None:
    whole, *stages = mixed.members
    for peer in stages:
        ready(peer)
    waiting = stages[1].ask(RoundJoin(0, "base"))
    assert isinstance(whole.request(Leaving("preempted")), Done)
    plan = stages[1].answer(waiting)
    assert isinstance(plan, RoundPlan), plan
    assert plan.members == ["w2"]


def test_a_job_that_is_no_swarm_has_no_ledger(running: Running) -> None:
    answer = running.members[0].request(SwarmAnnounce())
    assert isinstance(answer, Failure)
    assert "does not train as a SWARM" in answer.error["what"]


def test_rest_and_prometheus_show_the_stages(swarm: Running) -> None:
    operator = {"authorization": f"Bearer {swarm.hub.operator_token}"}
    with httpx.Client(
        base_url=swarm.hub.url, headers=operator, trust_env=False, timeout=PATIENCE_S
    ) as http:
        assert http.get(f"/api/jobs/{swarm.job}").json()["swarm"] is None
        assert "atoll_swarm_paused" not in http.get("/metrics").text
        ready(swarm.members[0])
        starting = http.get(f"/api/jobs/{swarm.job}").json()
        assert not starting["paused"], starting["paused_reason"]
        ready(swarm.members[1])
        view = http.get(f"/api/jobs/{swarm.job}").json()
        assert not view["paused"]
        peers = [stage["peers"] for stage in view["swarm"]["stages"]]
        assert [[peer["member"] for peer in stage] for stage in peers] == [["w0"], ["w1"]]
        assert peers[0][0]["node"] == view["members"][0]["node"]
        assert "job's stages" in http.get(f"/api/jobs/{swarm.job}/worth").json()["text"]
        text = http.get("/metrics").text
        labels = f'job="{swarm.job}",stage="1",state="ready"'
        assert f"atoll_stage_members{{{labels}}} 1" in text
        assert f'atoll_stage_slowest{{job="{swarm.job}",stage="0"}} 0.0' in text
        (row,) = http.get("/api/jobs?brief=1").json()
        assert "swarm" not in row
        assert event_texts(swarm.hub, swarm.job, "paused") == []
        assert isinstance(swarm.members[1].request(Leaving("preempted")), Done)
        until(lambda: http.get(f"/api/jobs/{swarm.job}").json()["paused"])
        view = http.get(f"/api/jobs/{swarm.job}").json()
        assert view["paused_reason"] == "no member serves stage 1"
        assert f'atoll_swarm_paused{{job="{swarm.job}"}} 1.0' in http.get("/metrics").text
    until(lambda: len(event_texts(swarm.hub, swarm.job, "paused")) == 1)


def test_without_checkpoint_a_lost_stage_begins_again(swarm: Running) -> None:
    first, second = swarm.members
    places = [ready(peer) for peer in swarm.members]
    ledger = ledger_of(swarm)
    ledger.steps.step = 3  # as if three steps were complete
    assert isinstance(second.request(Leaving("preempted")), Done)
    until(lambda: "no member serves stage 1" in ledger.paused())
    ledger.lost("w0", 0.0)
    ledger.steps.step = 3
    again = announced(first, SwarmAnnounce(epoch=places[0].epoch, stage=1, step=2))
    assert (again.step, again.stage, again.ready) == (0, 1, False)
    assert again.history > 0
    assert "all stages go back to step 0" in event_texts(swarm.hub, swarm.job, "alarm:rewound")[0]
