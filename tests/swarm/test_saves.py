"""Who saves what, and how a SWARM goes back to a checkpoint when a stage is lost."""

from __future__ import annotations

from atoll.swarm.ledger import Ledger
from atoll.swarm.places import SwarmSettings
from atoll.swarm.saves import Saves
from atoll.wire.swarm import SwarmAnnounce, SwarmNews, SwarmWatch
from tests.swarm.test_ledger import close_all, enter, holder, ledger_of, with_state

JOB = SwarmSettings(2, 3, steps=4, save_every=2)
STAGES = [["a", "b"], ["c"]]


def step_on(ledger: Ledger) -> None:
    """Complete a step with the members that serve now."""
    stages = [[m.holder.member for m in ledger.serving(stage)] for stage in range(2)]
    close_all(ledger, *(members[0] for members in stages))
    for stage, members in enumerate(stages):
        ledger.agreed(stage, ledger.step, members, 1.0)


def news(ledger: Ledger, member: str, *, step: int) -> SwarmNews:
    found = ledger.news(member, SwarmWatch(holder(ledger, member).epoch, step), 1.0)
    assert found is not None
    return found


def test_one_member_of_each_stage_saves_the_same_step() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3", job=JOB)
    step_on(ledger)
    assert news(ledger, "w0", step=0).savers == []
    step_on(ledger)
    savers = [news(ledger, member, step=1).savers for member in ("w0", "w1", "w2", "w3")]
    assert savers == [["w0", "w1"]] * 4
    ledger.saves.complete(2, 0)
    assert news(ledger, "w0", step=1).savers == []


def test_a_lost_saver_is_replaced_while_the_step_lasts() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3", job=JOB)
    step_on(ledger)
    step_on(ledger)
    assert ledger.savers() == ["w0", "w1"]
    ledger.lost("w1", 1.0)
    assert ledger.savers() == ["w0", "w3"]
    assert news(ledger, "w3", step=2).savers == ["w0", "w3"]
    ledger.lost("w3", 1.0)
    assert ledger.savers() == []


def test_a_saver_that_fails_is_replaced_once() -> None:
    saves = Saves(every=2, last=4)
    assert saves.savers(2, STAGES) == ["a", "c"]
    saves.failed("a", 2)
    assert saves.savers(2, STAGES) == ["b", "c"]
    saves.failed("c", 2)
    assert saves.savers(2, STAGES) == []
    assert not saves.over(2)
    assert saves.savers(4, STAGES) == ["b", "c"]
    saves.failed("c", 4)
    assert saves.savers(4, STAGES) == []
    assert saves.over(4), "no member can save the last step"


def test_the_job_is_over_when_its_last_step_is_saved() -> None:
    ledger = ledger_of("w0", "w1", job=JOB)
    for _ in range(JOB.steps):
        step_on(ledger)
    assert not ledger.finished
    assert news(ledger, "w0", step=3).savers == ["w0", "w1"]
    ledger.saves.complete(JOB.steps, 0)
    assert news(ledger, "w0", step=4).finished
    assert ledger.announce("w9", SwarmAnnounce(), 1.0).finished


def test_a_lost_stage_takes_all_back_to_the_checkpoint() -> None:
    ledger = ledger_of("w0", "w1", job=JOB)
    for _ in range(3):
        step_on(ledger)
    ledger.saves.complete(2, 0)
    ledger.lost("w1", 1.0)
    assert ledger.bereft(1.0) == -1, "no member waits for the stage yet"
    place = ledger.announce("w2", SwarmAnnounce(), 1.0)
    assert (place.stage, place.ready) == (-1, False)
    assert ledger.bereft(1.0) == 1
    ledger.go_back(2, 0, 1.0)
    place = ledger.announce("w2", SwarmAnnounce(epoch=holder(ledger, "w2").epoch), 1.0)
    assert (place.stage, place.step, place.donors) == (1, 2, [])
    assert news(ledger, "w0", step=3).dropped
    old = SwarmAnnounce(stage=0, step=2)  # of the same step, but of the history that is gone
    again = ledger.announce("w0", old, 1.0)
    assert (again.ready, again.step, again.donors) == (False, 2, [])
    assert again.history == place.history > 0
    assert with_state(ledger, "w0", again).ready
    assert with_state(ledger, "w2", place).ready
    step_on(ledger)
    assert ledger.step == 3


def test_a_lost_stage_of_the_saved_step_costs_nothing() -> None:
    ledger = ledger_of("w0", "w1", job=JOB)
    step_on(ledger)
    step_on(ledger)
    ledger.saves.complete(2, 0)
    ledger.lost("w1", 1.0)
    assert enter(ledger, "w2").ready
    assert ledger.history == 0
    assert ledger.serving(0)[0].holder.member == "w0"


def test_a_returning_holder_saves_its_stage() -> None:
    ledger = ledger_of("w0", "w1", job=JOB)
    step_on(ledger)
    epoch = holder(ledger, "w1").epoch
    ledger.lost("w1", 1.0)
    place = ledger.announce("w1", SwarmAnnounce(epoch=epoch, stage=1, step=1), 1.0)
    assert (place.ready, place.keep, place.step) == (True, False, 1)
    assert ledger.bereft(1.0) == -1


def test_after_a_restart_the_newest_history_is_believed() -> None:
    ledger = Ledger(JOB, first_number=100, expected=["w0", "w1"], rebuild_until=9.0, saved=-1)
    old = SwarmAnnounce(epoch=5, stage=0, step=3, history=1, ledger=100)
    assert ledger.announce("w0", old, 1.0).keep
    other = SwarmAnnounce(epoch=9, stage=1, step=2, history=8, ledger=100)
    assert ledger.announce("w1", other, 1.0).keep
    assert (ledger.step, ledger.history, sorted(ledger.members)) == (2, 8, ["w1"])
    assert ledger.announce("w2", SwarmAnnounce(), 1.0).stage == -1
    assert ledger.bereft(1.0) == 0


def test_a_lost_stage_is_rebuilt_from_its_neighbours_if_asked() -> None:
    ledger = ledger_of("w0", "w1", "w2", job=SwarmSettings(3, 3, neighbours=True))
    ledger.steps.step = 2
    ledger.lost("w1", 1.0)
    place = ledger.announce("w3", SwarmAnnounce(), 1.0)
    assert (place.stage, place.step, place.donors) == (1, 2, [])
    assert place.neighbours == [["w0"], ["w2"]]
    assert ledger.bereft(1.0) == -1
    epoch = holder(ledger, "w3").epoch
    refused = ledger.announce("w3", SwarmAnnounce(epoch=epoch, unlike=True), 1.0)
    assert (refused.stage, refused.neighbours) == (-1, [])
    assert ledger.bereft(1.0) == 1


def test_an_outer_stage_is_never_rebuilt_from_neighbours() -> None:
    ledger = ledger_of("w0", "w1", "w2", job=SwarmSettings(3, 3, neighbours=True))
    ledger.steps.step = 2
    ledger.lost("w2", 1.0)
    assert ledger.announce("w3", SwarmAnnounce(), 1.0).stage == -1
    assert ledger.bereft(1.0) == 2


def test_members_that_meet_seldom_end_after_one_more_step() -> None:
    """Those that are in the round before the present step cannot know of a stop."""
    ledger = ledger_of("w0", "w1", job=SwarmSettings(2, 3, steps=4, agrees=False))
    ledger.stop()
    assert (ledger.saves.last, ledger.last) == (1, False)
    ledger.begin(1)
    assert ledger.last


def test_a_stop_beyond_the_planned_steps_changes_nothing() -> None:
    ledger = ledger_of("w0", "w1", job=SwarmSettings(2, 3, steps=4, agrees=False))
    ledger.begin(4)
    ledger.stop()
    assert ledger.saves.last == 4
