"""A folder of checkpoints: complete or absent, damaged parts named, old ones pruned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from atoll.checkpoint import SHARED, DirectoryStore, Part, SavePoint, member_part
from atoll.checkpoint.format.part import STATE, part_blocks
from atoll.checkpoint.stores.folder import Folder, PartFile
from atoll.checkpoint.stores.store import stamped
from atoll.errors import CheckpointCorrupt, CheckpointMissing, StorageFull
from atoll.wire.manifest import MANIFEST_NAME
from atoll.wire.part_check import check_part
from atoll.wire.retention import Keep
from tests.patience import PATIENCE_S
from tests.small_disk import small_disk

PARTS = (SHARED, "w0.safetensors", "w1.safetensors")
MEMBERS = ("w0", "w1")


def parts_of(member: str, *, value: float = 0.0, state: str = "s") -> list[Part]:
    """Return what a member of two puts: its own part, and the first one the shared part."""
    own = Part(member_part(member), {"v": torch.full((7,), value)}, {STATE: state})
    shared = Part(SHARED, {"model/v": torch.full((7,), value)}, {STATE: state})
    return [shared, own] if member == "w0" else [own]


def fill(store: DirectoryStore, round_: int, *, value: float = 0.0, state: str = "s") -> None:
    for member in MEMBERS:
        parts = parts_of(member, value=value, state=state)
        store.put(SavePoint(round_, 10 * round_, member, MEMBERS), parts)


def folder_of(store: DirectoryStore, round_: int) -> Path:
    return store.folder / f"checkpoints/round-{round_:06d}"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "job", keep=3)


def test_checkpoint_exists_from_the_last_part_on(store: DirectoryStore) -> None:
    first = store.put(SavePoint(4, 40, "w0", MEMBERS), parts_of("w0", value=4.0))
    assert (first, store.latest()) == (False, -1)
    with pytest.raises(CheckpointMissing, match=r"round 4.*no round has one yet"):
        store.get(4, names=PARTS)
    last = store.put(SavePoint(4, 40, "w1", MEMBERS), parts_of("w1", value=4.0))
    assert (last, store.latest()) == (True, 4)
    found = store.get(4, names=PARTS)
    assert sorted(found) == sorted(PARTS)
    assert found["w1.safetensors"].tensors["v"].tolist() == [4.0] * 7
    manifest = store.manifest(4)
    assert (manifest.job, manifest.round, manifest.step) == ("job", 4, 40)
    assert manifest.members == ["w0", "w1"]
    assert [part.member for part in manifest.parts] == ["w0", "w0", "w1"]
    assert manifest.versions["torch"] == torch.__version__


def test_members_may_arrive_in_any_order_and_at_once(store: DirectoryStore) -> None:
    members = [f"w{slot}" for slot in range(6)]
    barrier = threading.Barrier(len(members))

    def put(member: str) -> None:
        barrier.wait(timeout=PATIENCE_S)
        store.put(SavePoint(1, 1, member, members), parts_of(member))

    threads = [threading.Thread(target=put, args=(member,)) for member in reversed(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert store.latest() == 1
    assert len(store.verify(1).parts) == 7


def test_get_returns_only_the_names_asked_for(store: DirectoryStore) -> None:
    fill(store, 1)
    assert list(store.get(1, names={"w1.safetensors", "w9.safetensors"})) == ["w1.safetensors"]


def test_parts_of_an_abandoned_attempt_never_mix_with_new_ones(store: DirectoryStore) -> None:
    store.put(SavePoint(5, 50, "w1", MEMBERS), parts_of("w1", state="old"))
    assert not store.put(SavePoint(5, 50, "w0", MEMBERS), parts_of("w0", state="new"))
    assert store.put(SavePoint(5, 50, "w1", MEMBERS), parts_of("w1", state="new"))
    assert store.get(5, names={"w1.safetensors"})["w1.safetensors"].metadata[STATE] == "new"


def test_same_state_again_leaves_the_checkpoint_alone(store: DirectoryStore) -> None:
    fill(store, 2)
    before = {path: path.stat().st_mtime_ns for path in folder_of(store, 2).iterdir()}
    assert store.put(SavePoint(2, 20, "w0", MEMBERS), parts_of("w0"))
    assert {path: path.stat().st_mtime_ns for path in folder_of(store, 2).iterdir()} == before


def test_other_state_of_the_same_round_replaces_the_checkpoint(store: DirectoryStore) -> None:
    fill(store, 2, value=1.0, state="old")
    fill(store, 2, value=2.0, state="new")
    assert store.get(2, names=PARTS)["w0.safetensors"].tensors["v"][0] == 2.0


class Late(list[PartFile]):
    """Files whose member is held up once it has looked for a manifest."""

    before: Callable[[], object] = staticmethod(lambda: None)

    def __iter__(self) -> Iterator[PartFile]:
        before, self.before = self.before, lambda: None
        before()
        return super().__iter__()


def test_members_that_replace_one_checkpoint_at_once(store: DirectoryStore) -> None:
    fill(store, 2, value=1.0, state="old")
    points = {member: SavePoint(2, 20, member, MEMBERS) for member in MEMBERS}
    stamp, parts = stamped(parts_of("w1", value=2.0, state="new"), points["w1"])
    files = Late(PartFile(p.name, partial(part_blocks, p.tensors, p.metadata)) for p in parts)
    files.before = lambda: store.put(points["w0"], parts_of("w0", value=2.0, state="new"))
    assert Folder(store.folder).put(2, files, stamp=stamp, step=20, members=MEMBERS)
    assert store.get(2, names=PARTS)["w0.safetensors"].tensors["v"][0] == 2.0


def test_only_the_last_ones_are_kept(store: DirectoryStore) -> None:
    for round_ in range(1, 7):
        fill(store, round_, state=str(round_))
    kept = sorted(path.name for path in (store.folder / "checkpoints").iterdir())
    assert kept == ["round-000004", "round-000005", "round-000006"]


def test_incomplete_ones_do_not_count_as_kept_and_are_removed(store: DirectoryStore) -> None:
    fill(store, 1)
    store.put(SavePoint(2, 20, "w0", MEMBERS), parts_of("w0"))
    fill(store, 3)
    kept = sorted(path.name for path in (store.folder / "checkpoints").iterdir())
    assert kept == ["round-000001", "round-000003"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("keep_bytes", [0, 1, 8, 100, -1])
def test_truncated_part_is_named_and_passed_over(
    store: DirectoryStore, part: str, keep_bytes: int
) -> None:
    fill(store, 1)
    fill(store, 2)
    path = folder_of(store, 2) / part
    path.write_bytes(path.read_bytes()[:keep_bytes])
    assert store.latest() == 1
    with pytest.raises(CheckpointCorrupt, match=f"part {part} .*round 2 has the wrong size"):
        store.get(2, names=PARTS)
    assert len(store.get(1, names=PARTS)) == 3


@pytest.mark.parametrize("part", PARTS)
def test_missing_part_is_named_and_passed_over(store: DirectoryStore, part: str) -> None:
    fill(store, 1)
    fill(store, 2)
    (folder_of(store, 2) / part).unlink()
    assert store.latest() == 1
    with pytest.raises(CheckpointCorrupt, match=f"part {part} .*round 2 is missing"):
        store.get(2, names=PARTS)


def test_every_flipped_bit_of_every_part_is_found(store: DirectoryStore) -> None:
    fill(store, 2)
    for entry in store.manifest(2).parts:
        path = folder_of(store, 2) / entry.name
        data = bytearray(path.read_bytes())
        for index in range(len(data)):
            data[index] ^= 1 << (index % 8)
            path.write_bytes(data)
            with pytest.raises(CheckpointCorrupt, match=f"part {entry.name} .* was altered"):
                check_part(path, entry, round_=2)
            data[index] ^= 1 << (index % 8)
        path.write_bytes(data)
        path.write_bytes(data + b"\0")
        with pytest.raises(CheckpointCorrupt, match="wrong size"):
            store.get(2, names=PARTS)
        path.write_bytes(data)
    assert len(store.get(2, names=PARTS)) == 3


def test_older_checkpoint_is_latest_if_a_manifest_is_damaged(
    store: DirectoryStore,
) -> None:
    fill(store, 1)
    fill(store, 2)
    path = folder_of(store, 2) / MANIFEST_NAME
    data = path.read_bytes()
    for cut in range(0, len(data) - 2, 7):
        path.write_bytes(data[:cut])
        assert store.latest() == 1
        with pytest.raises(CheckpointCorrupt, match=r"manifest\.json .*round 2 cannot be read"):
            store.get(2, names=PARTS)
    path.write_bytes(data.replace(b'"round": 2', b'"round": 3'))
    with pytest.raises(CheckpointCorrupt, match="is of another round"):
        store.get(2, names=PARTS)
    path.write_bytes(data.replace(b'"w0.safetensors"', b'"../w0.safetensors"'))
    with pytest.raises(CheckpointCorrupt, match="is of another round"):
        store.get(2, names=PARTS)


def test_missing_round_names_those_that_are_there(store: DirectoryStore) -> None:
    fill(store, 1)
    fill(store, 2)
    with pytest.raises(CheckpointMissing, match=r"round 7; .*one of rounds \[1, 2\]"):
        store.get(7, names=PARTS)


def test_strange_folders_do_not_disturb(store: DirectoryStore) -> None:
    fill(store, 1)
    (store.folder / "checkpoints/round-x").mkdir()
    (store.folder / "checkpoints/round-9").mkdir()
    (store.folder / "checkpoints/round-000008").write_text("a file")
    assert store.latest() == 1
    fill(store, 10)
    assert store.latest() == 10


def test_full_disk_leaves_the_older_checkpoint_valid(tmp_path: Path) -> None:
    with small_disk(tmp_path, nbytes=3 * 2**20):
        store = DirectoryStore(tmp_path / "job")
        fill(store, 1)
        small = Part("w0.safetensors", {"v": torch.zeros(2**18)})
        large = Part(SHARED, {"model/v": torch.zeros(2**20)})
        with pytest.raises(StorageFull, match="a checkpoint was not written"):
            store.put(SavePoint(2, 20, "w0", ["w0"]), [small, large])
        assert list(folder_of(store, 2).iterdir()) == []
        assert store.latest() == 1
        assert len(store.get(1, names=PARTS)) == 3
        fill(store, 3)
        assert store.latest() == 3


def test_resuming_from_an_older_round_drops_later_ones(
    store: DirectoryStore,
) -> None:
    for round_ in (2, 4, 6):
        fill(store, round_, state=str(round_))
    store.put(SavePoint(8, 80, "w0", MEMBERS), parts_of("w0"))
    assert store.abandon(after=3) == [4, 6, 8]
    assert store.latest() == 2
    fill(store, 4, state="another future")
    assert store.latest() == 4
    assert store.abandon(after=4) == []


def test_saving_removes_files_of_killed_writers(store: DirectoryStore) -> None:
    fill(store, 1)
    (folder_of(store, 1) / ".new-half").write_bytes(b"x")
    fill(store, 2)
    (folder_of(store, 2) / ".new-half").write_bytes(b"x")
    fill(store, 3)
    for round_ in (1, 2):
        assert sorted(p.name for p in folder_of(store, round_).iterdir()) == sorted(
            (*PARTS, MANIFEST_NAME)
        )


def test_the_best_are_kept_by_the_score_of_the_first_member(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "job", keep=Keep(newest=1, best=1))
    for round_, score in ((1, 2.0), (2, 1.0), (3, 3.0)):
        for member in MEMBERS:
            own = score if member == "w0" else 0.0
            point = SavePoint(round_, round_, member, MEMBERS, score=own)
            store.put(point, parts_of(member, state=str(round_)))
    kept = sorted(path.name for path in (store.folder / "checkpoints").iterdir())
    assert kept == ["round-000002", "round-000003"]
    assert store.manifest(2).score == 1.0
