"""The hub's part of a verification: commitments on disk, states checked, rights, an eviction."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from atoll.errors import AtollError, AuthError, HubError, WireError
from atoll.hub.server import HubServer
from atoll.hub.verification.service import VerificationService
from atoll.net.http.client import HubClient
from atoll.verification.challenge import Stage
from atoll.verification.state_file import digests_of, heading
from atoll.verification.trace import EMPTY, FRESH, mark_positions, state_digest
from atoll.wire.messages import (
    Commitment,
    Done,
    Event,
    Failure,
    Lease,
    Look,
    Received,
    RoundJoin,
    RoundPlan,
    VerificationAnswer,
    VerificationAsk,
    VerificationTask,
    VerificationWork,
)
from tests.hub.membership import Running, event_texts, job_of, options, until, vote
from tests.hub.peer import Peer

STEPS = 8
MODEL = b"parameters at the beginning"
BASE_FILE = heading(len(MODEL)) + MODEL + EMPTY


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Running]:
    with HubServer(options(tmp_path)) as hub:
        found = Running(hub, nodes=4, more='trust = "audit"')
        yield found
        found.close()


@pytest.fixture
def base(tmp_path: Path) -> str:
    (tmp_path / "state").write_bytes(BASE_FILE)
    model, own = digests_of(tmp_path / "state")
    assert own == FRESH
    return model


def service(group: Running) -> VerificationService:
    assert group.hub.hub is not None
    return group.hub.hub.verification


def commitment(slot: int, *, lies: bool = False) -> Commitment:
    marks = [state_digest(f"model after {at}", "own") for at in mark_positions(STEPS)]
    if lies:
        marks[1:] = [state_digest(mark, "made up") for mark in marks[1:]]
    return Commitment(
        step=0, length=STEPS, steps=STEPS, slot=slot, opening=FRESH, closing="own",
        marks=marks, contribution=f"of {slot}", arithmetic="avx2",
    )  # fmt: skip


def commit(
    group: Running, base: str, *, liar: int = -1, looks: dict[str, Look] | None = None
) -> None:
    """Commit a round in which everyone is challenged."""
    runtime = service(group)._runtime(group.job)
    runtime.ledger.draw.first_rounds = 1
    joins = [
        peer.ask(
            RoundJoin(0, base, lease=Lease(slot), commitment=commitment(slot, lies=slot == liar))
        )
        for slot, peer in enumerate(group.members)
    ]
    (plan, *_) = [peer.answer(id) for peer, id in zip(group.members, joins, strict=True)]
    assert isinstance(plan, RoundPlan)
    assert plan.verified
    group.reducer.tell(
        Received(plan.epoch, {f"w{i}": f"packet {i}" for i in range(4)}, looks or {})
    )
    until(lambda: len(runtime.attempts[plan.epoch].packets) == 4, "the reducer's report")
    ids = [peer.ask(vote(plan)) for peer in group.members]
    for peer, id in zip(group.members, ids, strict=True):
        peer.answer(id)
    until(lambda: len(runtime.ledger.open) == 4, "challenges")


def tasks(peer: Peer) -> list[VerificationTask]:
    answer = peer.request(VerificationAsk())
    assert isinstance(answer, VerificationWork), answer
    return answer.tasks


def task(peer: Peer, kind: str, member: str) -> VerificationTask:
    """Return a task of a member, as soon as it has it."""
    found: list[VerificationTask] = []

    def look() -> bool:
        found[:] = [one for one in tasks(peer) if (one.kind, one.member) == (kind, member)]
        return bool(found)

    until(look, f"{kind} of {member}")
    return found[0]


def client(group: Running, slot: int) -> HubClient:
    return HubClient(f"http://127.0.0.1:{group.hub.port}", group.launches[slot].token)


def hand_over(group: Running, slot: int, folder: Path, *, data: bytes = BASE_FILE) -> None:
    one = task(group.members[slot], "deposit", f"w{slot}")
    (folder / "handed").write_bytes(data)
    with client(group, slot) as rest:
        rest.put_state(group.job, one.challenge, 0, folder / "handed")


def test_commitments_are_on_disk_with_the_round(group: Running, base: str) -> None:
    commit(group, base)
    assert group.hub.hub is not None
    path = group.hub.hub.stores.jobs.folder(group.job) / "commitments.jsonl"
    until(lambda: path.exists() and len(path.read_bytes().splitlines()) == 4, "commitments")
    first = json.loads(path.read_bytes().splitlines()[0])
    assert (first["round"], first["member"]) == (0, "w0")
    assert first["commitment"]["marks"] == commitment(0).marks


def test_only_the_committed_state_is_taken(group: Running, base: str, tmp_path: Path) -> None:
    commit(group, base)
    wrong = heading(len(MODEL)) + MODEL[::-1] + EMPTY
    with pytest.raises(WireError, match="not the state that was committed to"):
        hand_over(group, 0, tmp_path, data=wrong)
    with pytest.raises(WireError, match="not a state"):
        hand_over(group, 0, tmp_path, data=b"x" * 100)
    hand_over(group, 0, tmp_path)
    assert not [one for one in tasks(group.members[0]) if one.kind == "deposit"]


def test_states_are_for_those_with_a_task(group: Running, base: str, tmp_path: Path) -> None:
    commit(group, base)
    number = task(group.members[0], "deposit", "w0").challenge
    (tmp_path / "handed").write_bytes(BASE_FILE)
    with client(group, 1) as other, pytest.raises(AtollError, match="no challenge waits"):
        other.put_state(group.job, number, 0, tmp_path / "handed")
    hand_over(group, 0, tmp_path)
    ledger = service(group)._runtime(group.job).ledger
    until(lambda: bool(ledger.open[number].checker), "a checker")
    checkers = [
        slot for slot in (1, 2, 3)
        if any(one.challenge == number for one in tasks(group.members[slot]))
    ]  # fmt: skip
    (checker,) = checkers
    with client(group, checker) as rest:
        rest.get_state(group.job, number, 0, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == BASE_FILE
    stranger = next(slot for slot in (1, 2, 3) if slot != checker)
    with client(group, stranger) as rest:
        with pytest.raises(HubError, match="no task"):
            rest.get_state(group.job, number, 0, tmp_path / "stolen")
        # Nor by the door of the job's files.
        with pytest.raises(AtollError, match="another way"):
            rest.put_file(group.job, f"verification/{number}-0", b"other")


def test_members_neither_read_nor_write_what_convicts(
    group: Running, base: str, tmp_path: Path
) -> None:
    commit(group, base)
    number = task(group.members[0], "deposit", "w0").challenge
    hand_over(group, 0, tmp_path)
    with client(group, 1) as rest:
        for name in ("commitments.jsonl", "verification.json", f"verification/{number}-0"):
            with pytest.raises(AuthError, match="members do not read"):
                rest.get_file(group.job, name, tmp_path / "read")
        with pytest.raises(AuthError, match="only the hub writes"):
            rest.put_file(group.job, "verification.json", b"{}")


def test_late_upload_does_not_replace_the_accepted_state(group: Running, base: str) -> None:
    commit(group, base)
    number = task(group.members[0], "deposit", "w0").challenge

    async def both() -> None:
        begun, accepted = asyncio.Event(), asyncio.Event()

        async def other() -> AsyncIterator[bytes]:
            begun.set()
            await accepted.wait()
            yield b"another state"

        async def committed() -> AsyncIterator[bytes]:
            yield BASE_FILE

        def upload(data: AsyncIterator[bytes]) -> asyncio.Future[None]:
            taking = service(group).take_state(group.job, "w0", number, 0, data)
            return asyncio.ensure_future(taking)

        late = upload(other())
        await begun.wait()
        await upload(committed())
        accepted.set()
        with pytest.raises(AtollError):
            await late

    assert group.hub.hub is not None
    group.hub.call(both())
    path = group.hub.hub.stores.files.path(group.job, f"verification/{number}-0")
    assert path.read_bytes() == BASE_FILE
    assert [one.name for one in path.parent.glob(f"{number}-*")] == [path.name]


def test_only_an_awaited_upload_moves_the_deadline(group: Running, base: str) -> None:
    commit(group, base)
    awaited = next(iter(service(group)._runtime(group.job).ledger.open.values()))
    challenge = dataclasses.replace(awaited, deadline=0.0)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"
        assert challenge.deadline > 0.0
        challenge.stage, challenge.deadline = Stage.REPLAY, 0.0  # another upload was accepted
        yield b"b"

    async def passed() -> list[bytes]:
        return [piece async for piece in service(group)._patiently(challenge, pieces())]

    assert group.hub.call(passed()) == [b"a", b"b"]
    assert challenge.deadline == 0.0


def test_states_of_a_challenge_that_begins_meanwhile_are_kept(
    group: Running,
) -> None:
    assert group.hub.hub is not None
    runtime, files = service(group)._runtime(group.job), group.hub.hub.stores.files
    runtime.ledger.number = 2
    left = {f"verification/{number}-0": number == 3 for number in (1, 2, 3)}

    async def drop() -> None:
        for name in left:
            await files.write(group.job, name, b"state")
        await service(group)._drop_states(runtime, keep=())

    group.hub.call(drop())
    assert {name: files.path(group.job, name).exists() for name in left} == left


def test_reports_of_the_reducer_come_from_the_reducer(group: Running) -> None:
    answer = group.members[0].request(Received(1, {"w0": "x"}))
    assert isinstance(answer, Failure)
    assert "only the reducer" in answer.error["what"]
    assert group.members[0].request(Event("note", "it lives")) == Done()


def test_who_has_a_strike_has_no_weight_in_the_next_rounds(group: Running, base: str) -> None:
    ledger = service(group)._runtime(group.job).ledger
    ledger.draw.struck("w2")
    joins = [
        peer.ask(RoundJoin(0, base, lease=Lease(slot), commitment=commitment(slot)))
        for slot, peer in enumerate(group.members)
    ]
    plans = [peer.answer(id) for peer, id in zip(group.members, joins, strict=True)]
    for plan in plans:
        assert isinstance(plan, RoundPlan)
        assert plan.unweighted == ["w2"]
        assert "w2" in plan.members


def test_liar_is_struck_and_at_the_third_strike_evicted(
    group: Running, base: str, tmp_path: Path
) -> None:
    liar = 2
    commit(group, base, liar=liar)
    ledger = service(group)._runtime(group.job).ledger
    ledger.book.of("w2").strikes = ["round -2: before", "round -1: before"]
    number = next(n for n, one in ledger.open.items() if one.member == "w2")
    hand_over(group, liar, tmp_path)
    until(lambda: bool(ledger.open[number].checker), "a checker")
    checker = int(ledger.open[number].checker[1:])
    found = commitment(liar)
    answer = VerificationAnswer(
        challenge=number, kind="replay", digests=found.marks, closing=found.closing,
        contribution=found.contribution, packet="packet 2",
    )  # fmt: skip
    group.members[checker].request(answer)
    # Marks are after steps 2, 4, 6 and 8: both name the digests of steps 3 and 4.
    for slot, last in ((checker, found.marks[1]), (liar, commitment(liar, lies=True).marks[1])):
        one = task(group.members[slot], "detail", "w2")
        assert (one.first, one.last) == (2, 4)
        details = VerificationAnswer(
            challenge=number, kind="detail", digests=[f"step 3 of {slot}", last]
        )
        group.members[slot].request(details)
    # The first that differs is step 3: the state before it is that of the mark at step 2.
    one = task(group.members[checker], "state", "w2")
    assert one.last == 2
    ledger.open[number].sides[f"w{checker}"][2] = state_digest(base, FRESH)
    (tmp_path / "handed").write_bytes(BASE_FILE)
    with client(group, checker) as rest:
        rest.put_state(group.job, number, 2, tmp_path / "handed")
    verdict = VerificationAnswer(challenge=number, kind="judge", digests=[f"step 3 of {checker}"])
    judges = set()
    for _ in range(2):  # both have to agree; which one is first is drawn
        until(lambda: bool(ledger.open[number].judge), "a judge")
        judge = int(ledger.open[number].judge[1:])
        judges.add(judge)
        group.members[judge].request(verdict)
    assert judges == {0, 1, 2, 3} - {liar, checker}
    until(lambda: job_of(group.hub, group.job).members["w2"].state == "failed", "an eviction")
    assert event_texts(group.hub, group.job, "strike") == [
        "w2: strike 3 in round 0: step 3 of 8 was not computed as the job says"
    ]
    assert "w2 is evicted after 3 strikes" in event_texts(group.hub, group.job, "alarm:evicted")[0]
    record = job_of(group.hub, group.job)
    assert {m: one.state for m, one in record.members.items() if m != "w2"} == {
        "w0": "running", "w1": "running", "w3": "running",
    }  # fmt: skip
    with client(group, liar) as rest, pytest.raises(AuthError):
        rest.files(group.job)
    with HubClient(f"http://127.0.0.1:{group.hub.port}", group.hub.operator_token) as operator:
        shown = operator.verification(group.job)
    assert shown["members"]["w2"]["evicted"]
    assert shown["settled"][0]["guilty"] == "w2"


def test_restarted_hub_checks_again_whose_challenge_it_cut_off(tmp_path: Path) -> None:
    with HubServer(options(tmp_path)) as hub:
        found = Running(hub, nodes=4, more='trust = "audit"')
        commit(found, "base")
        assert hub.hub is not None
        path = hub.hub.stores.jobs.folder(found.job) / "verification.json"
        until(path.exists, "the record")
        job, members = found.job, [f"w{slot}" for slot in range(4)]
        found.close()
    with HubServer(options(tmp_path)) as again:
        assert again.hub is not None
        ledger = again.hub.verification._runtime(job).ledger
        assert ledger.open == {}
        assert sorted(ledger.draw.again) == members
        assert set(ledger.draw.drawn(1, members).values()) == {"again"}


def test_looks_of_the_reducer_are_kept_and_decide_who_is_checked(group: Running, base: str) -> None:
    commit(group, base, looks={f"w{i}": Look(1.0 + i, 0.5, 0.4) for i in range(4)})
    ledger = service(group)._runtime(group.job).ledger
    assert ledger.book.of("w3").norm == 4.0
    with HubClient(f"http://127.0.0.1:{group.hub.port}", group.hub.operator_token) as operator:
        assert operator.verification(group.job)["members"]["w2"]["along"] == 0.4


def test_ordinary_job_has_no_verification(tmp_path: Path) -> None:
    with HubServer(options(tmp_path)) as hub:
        found = Running(hub)
        plan = found.plan()
        assert not plan.verified
        with (
            HubClient(f"http://127.0.0.1:{hub.port}", hub.operator_token) as operator,
            pytest.raises(HubError, match="not verified"),
        ):
            operator.verification(found.job)
        assert tasks(found.members[0]) == []
        found.close()


def test_message_sizes_are_bounded() -> None:
    one = commitment(0)
    assert len(msgspec.msgpack.encode(one)) < 1000
