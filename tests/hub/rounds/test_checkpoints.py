from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from atoll.errors import CheckpointCorrupt, CheckpointMissing
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.hub.storage.checkpoint_folders import newest_complete
from atoll.net.http.client import HubClient
from atoll.wire.manifest import MANIFEST_NAME, checkpoint_folder, decode_manifest
from atoll.wire.messages import (
    CheckpointPart,
    CheckpointState,
    Failure,
    Finished,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
)
from atoll.wire.part_check import Newest
from tests.hub.membership import Running, commands, job_of, launches, registered, until
from tests.hub.peer import Peer, member


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "runs", reducers=False, reconnect_grace_s=0.3
    )
    with HubServer(options) as hub:
        group = Running(hub)
        yield group
        group.close()


def folder_of(running: Running) -> Path:
    assert running.hub.hub is not None
    return running.hub.hub.stores.jobs.folder(running.job)


def put(running: Running, round_: int, name: str, data: bytes) -> CheckpointPart:
    """Put a part as the REST interface does; return what its member then announces."""
    assert running.hub.hub is not None

    async def chunks() -> AsyncIterator[bytes]:
        yield data

    path = f"{checkpoint_folder(round_)}/{name}"
    running.hub.call(running.hub.hub.stores.files.put(running.job, path, chunks()))
    return CheckpointPart(round_, 10 * round_, name, hashlib.sha256(data).hexdigest(), len(data))


def deliver(running: Running, slot: int, round_: int, *names: str) -> bool:
    """Deliver parts of one member; return whether the checkpoint was published then."""
    published = False
    for name in names:
        part = put(running, round_, name, f"{name} {round_}".encode())
        answer = running.members[slot].request(part)
        assert isinstance(answer, CheckpointState)
        published = answer.published
    return published


def commit(running: Running, round_: int, peers: list[Peer]) -> None:
    ids = [peer.ask(RoundJoin(round_, "base")) for peer in peers]
    plans = [peer.answer(id) for peer, id in zip(peers, ids, strict=True)]
    plan = plans[0]
    assert isinstance(plan, RoundPlan)
    ids = [peer.ask(RoundVote(round_, plan.epoch, True, "d", plan.members)) for peer in peers]
    for peer, id in zip(peers, ids, strict=True):
        verdict = peer.answer(id)
        assert isinstance(verdict, Verdict)
        assert verdict.committed


def test_manifest_is_published_when_the_last_member_delivered(running: Running) -> None:
    commit(running, 0, running.members)
    assert not deliver(running, 0, 1, "shared.safetensors", "w0.safetensors")
    assert not (folder_of(running) / checkpoint_folder(1) / MANIFEST_NAME).exists()
    assert newest_complete(folder_of(running)) == -1
    assert deliver(running, 1, 1, "w1.safetensors")
    manifest = decode_manifest(
        (folder_of(running) / checkpoint_folder(1) / MANIFEST_NAME).read_bytes()
    )
    assert (manifest.round, manifest.step, manifest.members) == (1, 10, ["w0", "w1"])
    assert [part.name for part in manifest.parts] == [
        "shared.safetensors",
        "w0.safetensors",
        "w1.safetensors",
    ]
    assert newest_complete(folder_of(running)) == 1


def test_shared_part_alone_completes_nothing(running: Running) -> None:
    commit(running, 0, running.members)
    assert not deliver(running, 1, 1, "w1.safetensors")
    assert not deliver(running, 0, 1, "shared.safetensors")
    assert deliver(running, 0, 1, "w0.safetensors")


def test_part_announced_twice_is_answered_the_same(running: Running) -> None:
    commit(running, 0, running.members)
    deliver(running, 0, 1, "shared.safetensors", "w0.safetensors")
    assert deliver(running, 1, 1, "w1.safetensors")
    assert deliver(running, 1, 1, "w1.safetensors")


def test_part_that_differs_from_its_announcement_is_refused(running: Running) -> None:
    commit(running, 0, running.members)
    part = put(running, 1, "w0.safetensors", b"data")
    for wrong in (
        CheckpointPart(1, 10, part.name, "0" * 64, part.nbytes),
        CheckpointPart(1, 10, "absent.safetensors", part.sha256, part.nbytes),
    ):
        answer = running.members[0].request(wrong)
        assert isinstance(answer, Failure)
        assert answer.error["kind"] == "CheckpointCorrupt"


def test_part_of_a_round_not_committed_is_refused(running: Running) -> None:
    commit(running, 0, running.members)
    for round_ in (-1, 2, 10**12):
        part = CheckpointPart(round_, 10, "w0.safetensors", "0" * 64, 1)
        answer = running.members[0].request(part)
        assert isinstance(answer, Failure)
        assert "not to save" in answer.error["what"], round_


def test_lost_member_does_not_hold_up_the_checkpoint(running: Running) -> None:
    commit(running, 0, running.members)
    assert not deliver(running, 0, 1, "shared.safetensors", "w0.safetensors")
    running.members[1].cut()
    manifest = folder_of(running) / checkpoint_folder(1) / MANIFEST_NAME
    until(manifest.exists)
    assert decode_manifest(manifest.read_bytes()).members == ["w0"]


def test_only_the_newest_are_kept(running: Running) -> None:
    for round_ in range(4):
        commit(running, round_, running.members)
        deliver(running, 0, round_ + 1, "shared.safetensors", "w0.safetensors")
        assert deliver(running, 1, round_ + 1, "w1.safetensors")
    kept = sorted(path.name for path in (folder_of(running) / "checkpoints").iterdir())
    assert kept == ["round-000003", "round-000004"]


def test_resumed_job_starts_from_the_newest_complete_checkpoint(running: Running) -> None:
    commit(running, 0, running.members)
    deliver(running, 0, 1, "shared.safetensors", "w0.safetensors")
    deliver(running, 1, 1, "w1.safetensors")
    commit(running, 1, running.members)
    deliver(running, 0, 2, "shared.safetensors")
    running.members[0].request(Finished(False, error={"kind": "LossNotFinite", "what": "nan"}))
    until(lambda: job_of(running.hub, running.job).state == "failed")
    assert len(commands(running.agent, 1)) == 1
    assert running.hub.hub is not None
    assert running.hub.call(running.hub.hub.live.resume(running.job)) == running.job
    again = launches(running.agent, 3)
    assert again["w0"].attempt == 2
    with member(running.hub, again["w0"], incarnation="second") as w0:
        answer = registered(w0)
        assert (answer.committed_round, answer.resume_round) == (1, 1)


def stopped_with_checkpoints(running: Running, num_rounds: int) -> Path:
    """Write a checkpoint per round, let the job fail, and return the folder of its checkpoints."""
    folder = folder_of(running)
    record = job_of(running.hub, running.job)
    table = dataclasses.replace(record.spec.checkpoint, keep=9)
    record.spec = dataclasses.replace(record.spec, checkpoint=table)
    for round_ in range(1, num_rounds + 1):
        commit(running, round_ - 1, running.members)
        deliver(running, 0, round_, "shared.safetensors", "w0.safetensors")
        assert deliver(running, 1, round_, "w1.safetensors")
    running.members[0].request(Finished(False, error={"kind": "LossNotFinite", "what": "nan"}))
    until(lambda: job_of(running.hub, running.job).state == "failed")
    return folder / "checkpoints"


def resume(running: Running, checkpoint: int | None = None) -> int:
    """Resume the job as `atoll resume` does; return the round that it continues from."""
    with HubClient(running.hub.url, running.hub.operator_token) as client:
        assert client.resume(running.job, checkpoint=checkpoint) == running.job
    return job_of(running.hub, running.job).resume_round


def test_resume_passes_over_damaged_checkpoints_and_reports_them(running: Running) -> None:
    folder = stopped_with_checkpoints(running, 3)
    altered = folder / "round-000003" / "w1.safetensors"
    altered.write_bytes(b"X" * altered.stat().st_size)  # the size is right, the bytes are not
    (folder / "round-000002" / "w0.safetensors").write_bytes(b"short")
    assert resume(running) == 1
    assert running.hub.hub is not None
    events = running.hub.call(running.hub.hub.stores.events.read(running.job))
    (text,) = [str(event["text"]) for event in events if event["kind"] == "checkpoint-damaged"]
    assert "round 3 (step 30)" in text
    assert "part w1.safetensors" in text
    assert "SHA-256 " + hashlib.sha256(b"X" * 16).hexdigest()[:16] in text
    assert "part w0.safetensors of the checkpoint of round 2 has the wrong size" in text
    assert "5 bytes, expected 16 bytes" in text
    assert "20 steps are lost" in text
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == ["round-000001", "round-000002-damaged", "round-000003-damaged"]


def test_resume_from_a_chosen_checkpoint(running: Running) -> None:
    folder = stopped_with_checkpoints(running, 3)
    with pytest.raises(CheckpointMissing, match=r"round 7") as missed:
        resume(running, 7)
    assert "[1, 2, 3]" in str(missed.value)
    assert resume(running, 2) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["round-000001", "round-000002"]


def test_job_with_damaged_checkpoints_only_restarts_when_asked(running: Running) -> None:
    folder = stopped_with_checkpoints(running, 1)
    (folder / "round-000001" / "w0.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"w0\.safetensors .* is missing") as refused:
        resume(running)
    assert "--checkpoint start" in str(refused.value)
    assert job_of(running.hub, running.job).state == "failed"
    assert resume(running, -1) == -1


def stamped(name: str, stamp: str, *, score: str = "", filling: int = 0) -> bytes:
    """Return a part that carries a stamp, and maybe a score."""
    texts = {"stamp": stamp} | ({"score": score} if score else {})
    tensor = {"dtype": "U8", "shape": [filling], "data_offsets": [0, filling]}
    header = json.dumps({"__metadata__": texts, "v": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(filling)


def deliver_stamped(
    running: Running, slot: int, round_: int, name: str, stamp: str, *, score: str = ""
) -> bool:
    part = put(running, round_, name, stamped(name, stamp, score=score))
    answer = running.members[slot].request(part)
    assert isinstance(answer, CheckpointState)
    return answer.published


def kinds(running: Running) -> list[str]:
    assert running.hub.hub is not None
    events = running.hub.call(running.hub.hub.stores.events.read(running.job))
    return [str(event["kind"]) for event in events]


def test_parts_of_an_abandoned_attempt_never_get_into_a_manifest(running: Running) -> None:
    commit(running, 0, running.members)
    assert not deliver_stamped(running, 1, 1, "w1.safetensors", "old")
    assert not deliver_stamped(running, 0, 1, "shared.safetensors", "new")
    assert not deliver_stamped(running, 0, 1, "w0.safetensors", "new")
    assert kinds(running).count("checkpoint-part-refused") == 1
    assert newest_complete(folder_of(running)) == -1
    assert deliver_stamped(running, 1, 1, "w1.safetensors", "new")
    assert newest_complete(folder_of(running)) == 1


def test_member_cannot_announce_the_part_of_another(running: Running) -> None:
    part = put(running, 1, "w0.safetensors", b"forged")
    answer = running.members[1].request(part)
    assert isinstance(answer, Failure)
    assert answer.error["kind"] == "CheckpointCorrupt"
    assert "not its own" in answer.error["what"]


def test_score_of_the_shared_part_gets_into_the_manifest(running: Running) -> None:
    commit(running, 0, running.members)
    deliver_stamped(running, 0, 1, "shared.safetensors", "s", score="2.5")
    deliver_stamped(running, 0, 1, "w0.safetensors", "s", score="0.1")
    assert deliver_stamped(running, 1, 1, "w1.safetensors", "s")
    path = folder_of(running) / checkpoint_folder(1) / MANIFEST_NAME
    assert decode_manifest(path.read_bytes()).score == 2.5


def test_rounds_after_the_resume_checkpoint_are_dropped(running: Running) -> None:
    for round_ in range(3):
        commit(running, round_, running.members)
        deliver(running, 0, round_ + 1, "shared.safetensors", "w0.safetensors")
        if round_ < 2:
            assert deliver(running, 1, round_ + 1, "w1.safetensors")
    assert newest_complete(folder_of(running)) == 2
    assert running.hub.hub is not None
    running.hub.call(running.hub.hub.checkpoints.begin(running.job, resume=Newest(1, 10)))
    kept = sorted(path.name for path in (folder_of(running) / "checkpoints").iterdir())
    assert kept == ["round-000001"]
    assert "checkpoints-abandoned" in kinds(running)
    assert not deliver(running, 1, 3, "w1.safetensors")  # nothing of round 3 is remembered


def chosen_while_a_newer_one_comes(running: Running, monkeypatch: pytest.MonkeyPatch) -> Newest:
    """Publish checkpoint 1 of a job that keeps one, choose it, and publish 2; return the choice."""
    assert running.hub.hub is not None
    checkpoints, record = running.hub.hub.checkpoints, job_of(running.hub, running.job)
    table = dataclasses.replace(record.spec.checkpoint, keep=1)
    record.spec = dataclasses.replace(record.spec, checkpoint=table)
    for round_ in (1, 2):
        commit(running, round_ - 1, running.members)
        deliver(running, 0, round_, "shared.safetensors", "w0.safetensors")
        if round_ == 1:
            assert deliver(running, 1, 1, "w1.safetensors")
    chosen = running.hub.call(checkpoints.newest(running.job))
    assert chosen.round == 1
    choose, late = checkpoints.newest, [chosen]

    async def newest(job: str, rounds: list[int] | None = None) -> Newest:
        return late.pop() if late else await choose(job, rounds)

    monkeypatch.setattr(checkpoints, "newest", newest)
    assert deliver(running, 1, 2, "w1.safetensors")
    until(lambda: not (folder_of(running) / checkpoint_folder(1)).exists())
    return chosen


def test_checkpoint_that_came_during_the_choice_is_kept(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_while_a_newer_one_comes(running, monkeypatch)
    assert running.hub.hub is not None
    found = running.hub.call(running.hub.hub.checkpoints.go_back(running.job))
    assert (found.round, newest_complete(folder_of(running))) == (2, 2)
    assert "checkpoints-abandoned" not in kinds(running)


def test_resume_from_a_deleted_checkpoint_deletes_no_other(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = chosen_while_a_newer_one_comes(running, monkeypatch)
    assert running.hub.hub is not None
    with pytest.raises(CheckpointMissing, match="round 1 was deleted"):
        running.hub.call(running.hub.hub.checkpoints.begin(running.job, resume=chosen))
    assert newest_complete(folder_of(running)) == 2


def test_nothing_is_abandoned_if_nobody_needs_it(running: Running) -> None:
    commit(running, 0, running.members)
    deliver(running, 0, 1, "shared.safetensors", "w0.safetensors")
    assert running.hub.hub is not None
    checkpoints = running.hub.hub.checkpoints
    running.hub.call(checkpoints.go_back(running.job, needed=lambda: False))
    assert deliver(running, 1, 1, "w1.safetensors")  # what came of the first round is remembered
