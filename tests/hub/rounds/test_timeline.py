"""Where the time of rounds goes: what the hub sees, what members tell; it decides nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.hub.app import HubOptions
from atoll.hub.rounds.timeline import (
    LARGEST,
    LEAST_KEPT,
    LONGEST_S,
    MAX_ROWS,
    PHASES,
    Row,
    Timeline,
    catch_up,
    decode,
    encode,
    round_bytes,
    validate_stats,
)
from atoll.hub.server import HubServer
from atoll.rounds.machine import RoundMachine
from atoll.wire.messages import (
    Done,
    Finished,
    MemberStats,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
)
from tests.hub.membership import Running, event_texts
from tests.rounds.group_model import Group
from tests.rounds.test_machine import SCHEDULES, play
from tests.tiers import examples

MEMBERS = ["w0", "w1"]
NODES = {"w0": "lap1", "w1": "lap2"}


def plan_of(round_: int, epoch: int) -> RoundPlan:
    return RoundPlan("j", round_, epoch, MEMBERS, "relay")


def join_of(round_: int, *, tokens: int = 0, busy_s: float = 4.0, **stats: Any) -> RoundJoin:
    return RoundJoin(
        round_, "b", tokens=tokens, steps=10, busy_s=busy_s, stats=MemberStats(**stats)
    )


def one_round(
    line: Timeline, round_: int, epoch: int, *, at: float, committed: bool = True, **join: Any
) -> list[Row]:
    """Let w0 come at `at`, w1 3 s later; both vote, 1 s apart."""
    line.joined("w0", join_of(round_, **join), [], at)
    line.joined("w1", join_of(round_, **join), [], at + 3.0)
    line.planned(plan_of(round_, epoch), at + 3.0)
    line.voted("w0", RoundVote(0, epoch, True), at + 5.0)
    line.voted("w1", RoundVote(0, epoch, True), at + 6.0)
    line.voted("w1", RoundVote(0, epoch, True), at + 6.5)
    verdict = Verdict(round_, epoch, committed, "d", MEMBERS)
    return line.decided(verdict, NODES, at + 7.0)


def test_timeline_shows_waits_and_exchange_times() -> None:
    first, second = one_round(Timeline(), 0, 1, at=10.0, update_norm=2.5, loss=3.5)
    assert (first.member, first.node) == ("w0", "lap1")
    assert (first.wait_s, first.send_s, first.vote_s) == (3.0, 2.0, 2.0)
    assert (second.wait_s, second.send_s, second.vote_s) == (0.0, 3.0, 1.0)
    assert (first.compute_s, first.update_norm, first.loss) == (4.0, 2.5, 3.5)
    assert first.apply_s is None


def test_what_members_tell_of_a_round_comes_with_their_next_join() -> None:
    line = Timeline()
    one_round(line, 0, 1, at=10.0)
    phases = {"wait": 2.9, "send": 1.9, "vote": 1.8, "apply": 0.5}
    line.joined("w0", join_of(1, phases=phases), [], 20.0)
    line.joined("w1", RoundJoin(1, "b"), [], 20.0)
    completed = line.planned(plan_of(1, 2), 20.0)
    assert completed is not None
    assert completed.epoch == 1
    first, second = completed.rows
    assert (first.wait_s, first.send_s, first.vote_s, first.apply_s) == (2.9, 1.9, 1.8, 0.5)
    assert (second.wait_s, second.apply_s) == (0.0, None)
    line.voted("w0", RoundVote(0, 2, True), 21.0)
    (row, _) = line.decided(Verdict(1, 2, True, "d", MEMBERS), NODES, 22.0)
    assert row.compute_s == 3.5, "applying the last result is part of the busy time, not of work"


def test_a_vote_brings_the_newer_report() -> None:
    line = Timeline()
    line.joined("w0", join_of(0), [], 10.0)
    line.planned(plan_of(0, 1), 10.0)
    newer = RoundJoin(0, "b", steps=12, busy_s=5.0, stats=MemberStats(loss=2.5))
    line.voted("w0", RoundVote(0, 1, True, report=newer), 11.0)
    (first, _) = line.decided(Verdict(0, 1, True, "d", MEMBERS), NODES, 12.0)
    assert (first.steps, first.compute_s, first.loss) == (12, 5.0, 2.5)


def test_work_counts_in_the_attempt_that_is_committed() -> None:
    line = Timeline()
    aborted = one_round(line, 0, 1, at=10.0, committed=False, tokens=500, loss=1.0)
    assert [row.compute_s for row in aborted] == [None, None]
    assert aborted[0].wait_s == 3.0
    committed = one_round(line, 0, 2, at=20.0, tokens=500, loss=1.0)
    assert [row.compute_s for row in committed] == [4.0, 4.0]
    # What they tell next is about both attempts together: the hub's own figures stay.
    line.joined("w0", join_of(1, phases={"wait": 99.0}), [], 30.0)
    assert line.planned(plan_of(1, 3), 31.0) is None


def test_tokens_are_those_of_the_period() -> None:
    line = Timeline()
    assert [row.tokens for row in one_round(line, 0, 1, at=0.0, tokens=100)] == [None, None]
    assert [row.tokens for row in one_round(line, 1, 2, at=10.0, tokens=350)] == [250, 250]
    fresh = one_round(line, 2, 3, at=20.0, tokens=50)
    assert [row.tokens for row in fresh] == [None, None], "a new process counts from zero"
    assert [row.tokens for row in one_round(line, 3, 4, at=30.0, tokens=80)] == [30, 30]


def test_attempt_before_a_hub_restart_has_no_times() -> None:
    line = Timeline()
    line.recall(plan_of(4, 9), {m: join_of(4, loss=2.0) for m in MEMBERS}, 100.0)
    line.voted("w0", RoundVote(0, 9, True), 101.0)
    first, second = line.decided(Verdict(4, 9, True, "d", MEMBERS), NODES, 102.0)
    assert (first.wait_s, first.send_s, first.loss) == (None, 1.0, 2.0)
    assert (second.send_s, second.compute_s) == (None, 4.0)


def test_verdict_on_another_attempt_has_no_rows() -> None:
    line = Timeline()
    assert line.decided(Verdict(0, 1, True), NODES, 1.0) == []
    line.planned(plan_of(0, 2), 1.0)
    assert line.decided(Verdict(0, 1, True), NODES, 1.0) == []


# ----------------------------------------------------------------------------- accounts

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.dictionaries(st.sampled_from([*PHASES, "other"]), ANY_FLOAT),
    st.none() | ANY_FLOAT,
    st.none() | ANY_FLOAT,
)
def test_only_usable_figures_are_kept(
    phases: dict[str, float], norm: float | None, loss: float | None
) -> None:
    join, odd = validate_stats(RoundJoin(0, "b", stats=MemberStats(phases, norm, loss)))
    stats = join.stats
    assert stats is not None
    assert all(0.0 <= seconds <= LONGEST_S for seconds in stats.phases.values())
    assert stats.update_norm is None or 0.0 <= stats.update_norm <= LARGEST
    assert stats.loss is None or abs(stats.loss) <= LARGEST
    named = {text.split()[0] for text in odd}
    kept = {**stats.phases, "update_norm": stats.update_norm, "loss": stats.loss}
    for name, value in {**phases, "update_norm": norm, "loss": loss}.items():
        dropped = value is not None and kept.get(name) is None
        assert dropped == (name in named or (name == "other" and "phases" in named))


def test_join_without_an_account_is_nothing_odd() -> None:
    join = RoundJoin(0, "b")
    assert validate_stats(join) == (join, [])


def test_what_is_odd_is_told_once_and_stays_in_the_row() -> None:
    line = Timeline()
    assert line.joined("w0", join_of(0), ["loss is nan"], 0.0) == ["loss is nan"]
    assert line.joined("w0", join_of(0), ["loss is nan"], 0.0) == []
    assert line.joined("w1", join_of(0), ["loss is inf"], 0.0) == ["loss is inf"]
    line.planned(plan_of(0, 1), 1.0)
    rows = line.decided(Verdict(0, 1, True, "d", MEMBERS), NODES, 2.0)
    assert [row.odd for row in rows] == [["loss is nan"], ["loss is inf"]]


def test_busy_time_that_cannot_be_is_left_out_of_the_timeline() -> None:
    rows = one_round(Timeline(), 0, 1, at=0.0, busy_s=math.nan)
    assert rows[0].compute_s is None
    assert rows[0].odd == ["busy_s is nan"]


@settings(max_examples=examples(60), deadline=None)
@given(SCHEDULES, st.none() | ANY_FLOAT, ANY_FLOAT)
def test_accounts_never_change_a_decision(
    actions: list[tuple[str, int, bool]], norm: float | None, seconds: float
) -> None:
    """The same occurrences with and without accounts: the same plans, verdicts and patience."""
    plain = play(actions)
    stats = MemberStats(dict.fromkeys(PHASES, seconds), norm, seconds)
    join = RoundMachine.join

    def told_more(self: RoundMachine, member: str, body: RoundJoin, now: float) -> Any:
        return join(self, member, msgspec.structs.replace(body, stats=stats), now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundMachine, "join", told_more)
        rich = play(actions)
    assert rich.verdicts == plain.verdicts
    assert outcome(rich) == outcome(plain)


def outcome(group: Group) -> tuple[Any, ...]:
    machine = group.machine
    measures = msgspec.to_builtins(machine.commit_log.timings)
    return machine.epoch, machine.committed_round, machine.members, measures, group.now


# ------------------------------------------------------------------------------ the table


def test_rows_are_whole_and_older_rows_are_read() -> None:
    row = Row(member="w0", node="n", compute_s=1.0, loss=2.0, tokens=3, odd=["x"])
    assert decode(encode([row])) == [row]
    assert decode(msgspec.msgpack.encode([["w0", "n", 1.5]])) == [
        Row(member="w0", node="n", compute_s=1.5)
    ]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


def meet(group: Running, round_: int, accounts: list[MemberStats | None], **more: Any) -> Verdict:
    """Hold one round over real sockets."""
    ids = [
        peer.ask(RoundJoin(round_, f"base{round_}", stats=stats, steps=5, busy_s=1.5, **more))
        for peer, stats in zip(group.members, accounts, strict=True)
    ]
    plans = [peer.answer(id) for peer, id in zip(group.members, ids, strict=True)]
    plan = plans[0]
    assert isinstance(plan, RoundPlan), plans
    vote = RoundVote(plan.round, plan.epoch, True, "digest", plan.members)
    ids = [peer.ask(vote) for peer in group.members]
    verdicts = [peer.answer(id) for peer, id in zip(group.members, ids, strict=True)]
    assert isinstance(verdicts[0], Verdict), verdicts
    return verdicts[0]


def test_rest_shows_timelines_and_odd_figures(hub: HubServer) -> None:
    group = Running(hub)
    wild = MemberStats({"wait": math.inf}, math.nan, -1e300)
    meet(group, 0, [MemberStats({}, 1.5, 2.0), None], tokens=0)
    meet(group, 1, [MemberStats({"wait": 0.25, "apply": 0.5}, 1.25, 1.75), wild], tokens=640)
    assert hub.hub is not None
    rows = hub.call(hub.hub.live.rounds(group.job))
    first, second = rows[0]["timeline"]
    assert (first["member"], first["node"]) == ("w0", group.agent.session)
    assert (first["wait_s"], first["apply_s"]) == (0.25, 0.5), "reported with the next join"
    assert (first["update_norm"], first["loss"], first["compute_s"]) == (1.5, 2.0, 1.5)
    assert (second["apply_s"], second["loss"]) == (None, None)
    assert second["send_s"] > 0
    first, second = rows[1]["timeline"]
    assert (first["tokens"], first["compute_s"], first["loss"]) == (640, 1.0, 1.75)
    assert (second["update_norm"], second["loss"]) == (None, None)
    assert len(second["odd"]) == 3
    (text,) = event_texts(hub, group.job, "stats-odd")
    assert text.startswith(
        "w1 reported invalid statistics: wait is inf, update_norm is nan, loss is -1e"
    )
    group.close()


def test_old_timelines_are_thinned_and_the_newest_stay(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_ROWS // 2 > LEAST_KEPT
    monkeypatch.setattr("atoll.hub.rounds.timeline.MAX_ROWS", 0)
    monkeypatch.setattr("atoll.hub.rounds.timeline.LEAST_KEPT", 8)
    monkeypatch.setattr("atoll.hub.rounds.timeline._THIN_EVERY", 4)
    group = Running(hub)
    for round_ in range(24):
        meet(group, round_, [None, None])
    assert hub.hub is not None
    kept = hub.call(catch_up(hub.hub.stores.database, group.job))
    assert 6 <= len(kept) <= 12
    assert [one.round for one in kept[-3:]] == [21, 22, 23]
    assert kept[0].round == 0
    rows = hub.call(hub.hub.live.rounds(group.job))
    assert len(rows) == 24, "the rounds themselves stay"
    assert rows[1]["timeline"] == []
    newest = hub.call(catch_up(hub.hub.stores.database, group.job, after=kept[-2].epoch))
    assert [one.round for one in newest] == [23]
    group.close()


def test_running_jobs_files_show_where_time_goes(hub: HubServer) -> None:
    group = Running(hub)
    for round_ in range(3):
        meet(group, round_, [MemberStats({}, 1.0, 2.0), None], tokens=100 * round_)
    assert isinstance(group.members[0].request(Finished(ok=True)), Done)
    assert hub.hub is not None
    folder = hub.hub.stores.jobs.folder(group.job)
    found = json.loads((folder / "rounds.json").read_text())
    assert [one["round"] for one in found["rounds"]] == [0, 1, 2]
    assert found["rounds"][2]["timeline"][0]["tokens"] == 100
    assert found["worth"]["text"] == "too early to say: 2 of 5 rounds"
    group.close()


def test_a_rounds_bytes_are_those_that_its_members_sent() -> None:
    rows: list[dict[str, Any]] = [{"sent_bytes": 100.0}, {"sent_bytes": 50.0}]
    unknown: list[dict[str, Any]] = [{"sent_bytes": 100.0}, {"sent_bytes": None}]
    assert round_bytes("direct", 0, rows) == 150
    assert round_bytes("direct", 0, unknown) is None
    assert round_bytes("relay", 70, unknown) == 70
