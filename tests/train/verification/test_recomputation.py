"""A checker that never saw a member finds the member's own digests again, and every difference."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.codec import make_codec
from atoll.config import JobSpec, parse_spec
from atoll.errors import ConfigError, WireError
from atoll.train.verification.kept_state import KeptState
from atoll.train.verification.own_part import (
    bytes_digest,
    load_own,
    own_bytes,
    own_digest,
)
from atoll.train.verification.recomputation import Recomputation
from atoll.verification.state_file import digests_of, heading
from atoll.verification.trace import FRESH, packet_digest, state_digest
from atoll.wire.messages import Commitment, VerificationTask
from bench.audit.members import SimulatedMember, Turn

EVERY = 6


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("text")
    words = " ".join(str(i * i) for i in range(40_000))
    (folder / "text.txt").write_text(words, encoding="utf-8", newline="\n")
    return parse_spec(
        f"""
        [job]
        nodes = 2
        device = "cpu"
        [model]
        name = "gpt"
        layers = 1
        width = 16
        heads = 2
        context = 16
        dropout = 0.1
        [data]
        corpus = "files:{folder}/*.txt"
        [train]
        steps = 60
        batch = 4
        warmup = 5
        pace = "equal"
        [strategy]
        preset = "diloco"
        codec = "int8"
        every = {EVERY}
        shared_steps = 0
        """
    )


@pytest.fixture(scope="module")
def checker(spec: JobSpec) -> Recomputation:
    return Recomputation(spec, num_slots=2)


@pytest.fixture
def member(spec: JobSpec) -> SimulatedMember:
    found = SimulatedMember(spec, "w1", num_slots=2)
    for _ in range(2):  # so that it has momentum, and is inside its data
        turn = found.train()
        found.take(turn.delta)
    return found


def task(kind: str, own: Commitment, turn: Turn, **more: int) -> VerificationTask:
    fields = {"first": 0, "last": own.steps, **more}
    return VerificationTask(
        challenge=1, kind=kind, member="w1", round=2, step=own.step, length=own.length,
        steps=own.steps, slot=turn.given[0], cursor=turn.given[1], **fields,
    )  # fmt: skip


def through_a_file(state: KeptState, folder: Path) -> KeptState:
    state.write(folder / "state")
    return KeptState.read(folder / "state")


def test_replay_finds_what_the_member_committed_to(
    member: SimulatedMember, checker: Recomputation, tmp_path: Path
) -> None:
    turn = member.train()
    own, kept = turn.commitment, member.witness.kept(2)
    assert kept is not None
    assert own.opening != FRESH  # it goes on with its momentum
    opening = through_a_file(kept, tmp_path)
    assert digests_of(tmp_path / "state") == (turn.base, own.opening)
    found = checker.run(task("replay", own, turn), opening).answer
    assert found.digests == own.marks
    assert (found.closing, found.contribution) == (own.closing, own.contribution)
    packet = turn.packet
    assert found.packet == packet_digest(packet.codec, turn.weight, packet.data) == turn.received
    # The same again, from the same object: nothing is left of the first time.
    assert checker.run(task("replay", own, turn), opening).answer == found


def test_judge_computes_one_step_from_the_state_before(
    member: SimulatedMember, checker: Recomputation, tmp_path: Path
) -> None:
    turn = member.train()
    own, opening = turn.commitment, member.witness.kept(2)
    assert opening is not None
    detail = checker.run(task("detail", own, turn), opening).answer.digests
    assert len(detail) == EVERY
    assert set(own.marks) <= set(detail)
    for step in (1, 3, EVERY):
        handed = checker.run(task("state", own, turn, last=step - 1), opening).state
        assert handed is not None
        before = through_a_file(handed, tmp_path)
        digests = digests_of(tmp_path / "state")
        if step > 1:
            assert state_digest(*digests) == detail[step - 2]
        judged = checker.run(
            task("judge", own, turn, first=step - 1, last=step), before, start=opening.model
        ).answer
        assert judged.digests == [detail[step - 1]]
    # After the last step it finds what the period ends in, the weight of all steps too.
    assert (judged.closing, judged.contribution) == (own.closing, own.contribution)
    assert judged.packet == turn.received


@pytest.mark.parametrize(
    ("cheat", "differs"),
    [("skip", "marks"), ("data", "marks"), ("flip", "contribution"), ("stale", "contribution")],
)
def test_every_cheat_shows(
    member: SimulatedMember, checker: Recomputation, cheat: str, differs: str
) -> None:
    member.cheat = cheat
    if cheat == "stale":
        member.take(member.train().delta)
    turn = member.train()
    own, kept = turn.commitment, member.witness.kept(member.task.round)
    assert kept is not None
    wanted = msgspec.structs.replace(task("replay", own, turn), round=member.task.round)
    found = checker.run(wanted, kept).answer
    assert (found.digests == own.marks) == (differs != "marks")
    assert found.contribution != own.contribution


@pytest.mark.parametrize(
    "way", ["text", "shape", "scalar", "type", "bytes", "nothing there", "numbers", "more"]
)
def test_own_part_that_was_made_up_is_found_unusable(
    checker: Recomputation, member: SimulatedMember, way: str
) -> None:
    """All checkers say so, whatever their step code makes of it: a strike for its member."""
    turn = member.train()
    own = turn.commitment
    opening = member.witness.kept(member.task.round)
    assert opening is not None
    line, _, rest = opening.own.partition(b"\n")
    listed = json.loads(line)
    first = next(one for one in listed if one[0].endswith("exp_avg") and len(one[2]) > 1)
    if way == "shape":
        first[2] = [math.prod(first[2])]
    elif way == "scalar":  # a fused step would write beyond it
        first[2] = []
    elif way == "bytes":
        first[1] = "uint8"
    elif way == "type":
        first[1] = "int32"
    elif way == "nothing there":
        listed, rest = [one for one in listed if one is not first][:1], rest[:4]
    elif way == "numbers":
        listed, rest = [[one[0], "value", 1.0] for one in listed], b""
    elif way == "more":
        listed.append(["9999.exp_avg", "float32", [0]])
    made_up = json.dumps(listed).encode() + b"\n" + rest
    state = replace(opening, own=b"made up" if way == "text" else made_up)
    found = checker.run(task("replay", own, turn), state)
    assert found.answer.unusable
    assert found.answer.failed
    again = checker.run(task("replay", own, turn), opening)  # and honest ones are as before
    assert again.answer.digests == own.marks


def test_two_openings_are_kept(member: SimulatedMember) -> None:
    member.take(member.train().delta)
    member.train()
    assert member.witness.kept(1) is None
    assert member.witness.kept(2) is not None
    assert member.witness.kept(3) is not None


def test_after_a_start_the_own_part_is_that_of_no_step(member: SimulatedMember) -> None:
    assert own_digest(member.task.optimizer) != FRESH
    member.witness.restarted()
    assert own_digest(member.task.optimizer) == FRESH
    assert member.train().commitment.opening == FRESH


def test_own_part_comes_back_bit_for_bit(member: SimulatedMember) -> None:
    optimizer = member.task.optimizer
    data = b"".join(own_bytes(optimizer))
    assert bytes_digest(data) == own_digest(optimizer)
    before = {
        k: v.clone() for k, v in optimizer.state[optimizer.param_groups[0]["params"][0]].items()
    }
    optimizer.state.clear()
    load_own(optimizer, data)
    after = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert own_digest(optimizer) == bytes_digest(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"a": 1}\n',
        b'[["0.x","float32",[4]]]\n',
        b'[["9999.x","value",1]]\n',
        b'[["-9999.x","value",1]]\n',
        b"[]\n1",
    ],
)
def test_damaged_own_parts_are_refused(member: SimulatedMember, data: bytes) -> None:
    before = own_digest(member.task.optimizer)
    with pytest.raises(WireError, match="cannot be used"):
        load_own(member.task.optimizer, data)
    assert own_digest(member.task.optimizer) == before


@pytest.mark.parametrize("data", [b"", b"x\n", b'{"model": -1}\n', b'{"model": 8}\n1234'])
def test_damaged_state_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(data)
    with pytest.raises(WireError):
        digests_of(path)
    with pytest.raises(WireError):
        KeptState.read(path)


def test_state_file_without_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(heading(0))
    with pytest.raises(WireError, match="cut off"):
        KeptState.read(path)


def test_optimizer_with_another_kind_of_state_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["history"] = [1, 2]
    with pytest.raises(ConfigError, match="cannot be verified"):
        list(own_bytes(optimizer))


def test_packet_digest_depends_on_weight_and_codec() -> None:
    packet = make_codec("int8").encode(torch.randn(300))
    one = packet_digest("int8", 2.0, packet.data)
    assert one != packet_digest("int8", 2.5, packet.data)
    assert one != packet_digest("int4", 2.0, packet.data)


def test_turns_name_what_the_reducer_gets(member: SimulatedMember) -> None:
    turn = member.train()
    assert replace(turn, weight=turn.weight * 2).received != turn.received
