"""Who fetches what: every chunk once, from any donor that is left, in any order of events."""

from __future__ import annotations

import random
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.recovery import chunk_scheduler as scheduler_module
from atoll.recovery import partial_state as target_module
from atoll.recovery.chunk_scheduler import ChunkScheduler, check_manifest
from atoll.recovery.donor_session import ask_order
from atoll.recovery.partial_state import PartialState
from atoll.recovery.source import SourceCorrupt, SourceDiffers, SourceFailed
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import Source
from atoll.wire.recovery_messages import StateManifest, state_manifest
from tests.patience import PATIENCE_S
from tests.tiers import examples


def data_of(name: str, *, count: int = 5, seed: int = 0) -> bytes:
    size = (count - 1) * CHUNK_BYTES + 10
    return random.Random(f"{name} {seed}").randbytes(size)


def manifest_of(data: bytes, name: str = "shared") -> StateManifest:
    return state_manifest(memoryview(data), job="j", round_=1, base="b", name=name)


def chunk_of(data: bytes, index: int) -> memoryview:
    return memoryview(data)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


SHARED_DATA, INNER_DATA = data_of("shared"), data_of("inner", count=3)
SHARED_MANIFEST, INNER_MANIFEST = manifest_of(SHARED_DATA), manifest_of(INNER_DATA, "inner")


def new_scheduler(*members: str, kept: PartialState | None = None) -> ChunkScheduler:
    scheduler = ChunkScheduler(list(members), kept=kept)
    assert scheduler.sources_to_start() == list(members)[: scheduler_module.MAX_SOURCES]
    return scheduler


def store_chunk(scheduler: ChunkScheduler, member: str, image: PartialState, index: int) -> None:
    data = SHARED_DATA if image is scheduler.shared else INNER_DATA
    scheduler.store_chunk(member, image, index, chunk_of(data, index))


def test_a_target_takes_every_chunk_once_in_any_order() -> None:
    image = PartialState(SHARED_MANIFEST)
    indices = image.claim("w0", most=3, now=0.0)
    assert indices == [0, 1, 2]
    assert image.claim("w1", most=3, now=0.0) == [3, 4]
    assert image.claim("w2", most=3, now=0.0) == []
    for index in (4, 0, 3, 1):
        assert image.store(index, chunk_of(SHARED_DATA, index))
    assert not image.store(0, chunk_of(SHARED_DATA, 0))
    assert not image.complete
    assert image.store(2, chunk_of(SHARED_DATA, 2))
    assert image.complete
    assert bytes(image.buffer) == SHARED_DATA


def test_chunks_of_a_source_that_left_are_claimed_by_others() -> None:
    image = PartialState(SHARED_MANIFEST)
    image.claim("w0", most=3, now=0.0)
    image.store(1, chunk_of(SHARED_DATA, 1))
    image.release("w0")
    assert image.claim("w1", most=9, now=0.0) == [0]
    assert image.claim("w1", most=9, now=0.0) == [2, 3, 4]


def test_slow_chunk_is_requested_from_one_other_donor() -> None:
    image = PartialState(SHARED_MANIFEST)
    image.claim("w0", most=9, now=0.0)
    late = target_module.DUPLICATE_AFTER_S + 1
    assert image.claim("w1", most=9, now=late) == [0]
    assert image.claim("w2", most=9, now=late) == [1]
    assert image.claim("w0", most=9, now=late) == []
    image.release("w0")
    assert image.claim("w3", most=9, now=late) == [2, 3, 4]


@pytest.mark.parametrize(("index", "size"), [(0, 10), (4, 11), (5, 10), (-1, CHUNK_BYTES)])
def test_a_chunk_of_the_wrong_size_is_a_lie(index: int, size: int) -> None:
    with pytest.raises(SourceCorrupt, match="wrong size"):
        PartialState(SHARED_MANIFEST).check(index, memoryview(bytes(size)))


def test_a_kept_image_goes_on_where_it_stood() -> None:
    scheduler = new_scheduler("w0")
    scheduler.add_source("w0", SHARED_MANIFEST, INNER_MANIFEST)
    claim = scheduler.claim("w0")
    assert claim is not None
    store_chunk(scheduler, "w0", claim.image, 0)
    scheduler.remove_source("w0")
    assert scheduler.finished
    assert not scheduler.complete
    later = new_scheduler("w1", kept=scheduler.shared)
    later.add_source("w1", SHARED_MANIFEST, INNER_MANIFEST)
    claim = later.claim("w1")
    assert claim is not None
    assert claim.indices == [1, 2]


def test_majority_state_is_taken_and_others_are_named() -> None:
    other = manifest_of(data_of("shared", seed=1))
    scheduler = new_scheduler("w0", "w1", "w2")
    scheduler.add_source("w0", other, INNER_MANIFEST)
    assert scheduler.shared is not None
    assert scheduler.shared.root == other.root
    wrong = scheduler.claim("w0")
    assert wrong is not None
    scheduler.add_source("w1", SHARED_MANIFEST, INNER_MANIFEST)
    scheduler.add_source("w2", SHARED_MANIFEST, INNER_MANIFEST)
    assert scheduler.shared.root == SHARED_MANIFEST.root
    late = chunk_of(data_of("shared", seed=1), 0)
    scheduler.store_chunk("w0", wrong.image, 0, late)  # under way when the others spoke
    assert scheduler.donors == set()
    with pytest.raises(SourceDiffers):
        scheduler.claim("w0")
    assert scheduler.claim("w1") is not None


def test_the_last_report_ends_it_if_all_is_here_already() -> None:
    scheduler = new_scheduler("w0", "w1")
    scheduler.add_source("w0", SHARED_MANIFEST, INNER_MANIFEST)
    for _ in range(8):
        claim = scheduler._next("w0", scheduler._entries["w0"])
        if claim is not None:
            for index in claim.indices:
                store_chunk(scheduler, "w0", claim.image, index)
    assert not scheduler.finished  # w1 may have another state
    scheduler.add_source("w1", SHARED_MANIFEST, INNER_MANIFEST)
    assert scheduler.finished
    assert scheduler.complete


def test_sources_beyond_the_most_are_asked_when_others_left() -> None:
    scheduler = new_scheduler(*[f"w{i}" for i in range(6)])
    assert scheduler.sources_to_start() == []
    scheduler.remove_source("w1")
    assert scheduler.sources_to_start() == ["w4"]
    for member in ("w0", "w2", "w3", "w4"):
        scheduler.remove_source(member)
    assert not scheduler.finished
    assert scheduler.sources_to_start() == ["w5"]
    scheduler.remove_source("w5")
    assert scheduler.finished


def test_inner_image_restarts_with_another_donor() -> None:
    scheduler = new_scheduler("w0", "w1")
    for member in ("w0", "w1"):
        scheduler.add_source(member, SHARED_MANIFEST, INNER_MANIFEST)
    while scheduler.inner is None:
        claim = scheduler.claim("w0")
        assert claim is not None
        if claim.image is scheduler.shared:
            for index in claim.indices:
                store_chunk(scheduler, "w0", claim.image, index)
    first = scheduler.inner
    store_chunk(scheduler, "w0", first, 0)
    scheduler.remove_source("w0")
    claim = scheduler.claim("w1")
    while claim is not None and claim.image is scheduler.shared:
        for index in claim.indices:
            store_chunk(scheduler, "w1", claim.image, index)
        claim = scheduler.claim("w1")
    assert claim is not None
    assert claim.image is scheduler.inner
    assert claim.image is not first
    assert claim.indices[0] == 0


def test_without_the_last_source_the_shared_image_is_enough() -> None:
    scheduler = new_scheduler("w0")
    scheduler.add_source("w0", SHARED_MANIFEST, INNER_MANIFEST)
    assert scheduler.shared is not None
    for index in range(5):
        store_chunk(scheduler, "w0", scheduler.shared, index)
    assert not scheduler.finished
    scheduler.remove_source("w0")
    assert scheduler.finished
    assert scheduler.complete
    assert scheduler.inner is None


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_order_of_events_ends_with_the_right_bytes(data: st.DataObject) -> None:
    members = [f"w{i}" for i in range(data.draw(st.integers(1, 6)))]
    scheduler = ChunkScheduler(list(members))
    inner = {m: data_of("inner", count=3, seed=i) for i, m in enumerate(members)}
    alive: list[str] = []
    survivor = data.draw(st.sampled_from(members))
    steps = 0
    while not scheduler.finished:
        steps += 1
        assert steps < 500
        for member in scheduler.sources_to_start():
            scheduler.add_source(member, SHARED_MANIFEST, manifest_of(inner[member], "inner"))
            alive.append(member)
        member = data.draw(st.sampled_from(alive))
        claim = scheduler._next(member, scheduler._entries[member])
        fate = data.draw(st.sampled_from(["all", "some", "none", "dies", "lies"]))
        if claim is None:
            continue
        source = SHARED_DATA if claim.image is scheduler.shared else inner[member]
        indices = claim.indices if fate == "all" else claim.indices[:1]
        if fate in ("all", "some"):
            for index in indices:
                scheduler.store_chunk(member, claim.image, index, chunk_of(source, index))
        if fate == "lies":
            with pytest.raises(SourceCorrupt):
                scheduler.store_chunk(member, claim.image, indices[0], memoryview(bytes(10)))
        if fate in ("dies", "lies") and member != survivor:
            alive.remove(member)
            scheduler.remove_source(member)
        else:
            scheduler.release_chunks(member)
    assert scheduler.complete
    assert scheduler.shared is not None
    assert bytes(scheduler.shared.buffer) == SHARED_DATA
    assert scheduler.inner is not None
    assert bytes(scheduler.inner.buffer) in inner.values()


@pytest.mark.parametrize(
    "wrong", [{"job": "k"}, {"round_": 2}, {"base": "c"}, {"name": "inner"}], ids=str
)
def test_a_manifest_of_something_else_is_a_lie(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {"job": "j", "round_": 1, "base": "b", "name": "shared"}
    assert check_manifest(SHARED_MANIFEST, **right) is SHARED_MANIFEST  # type: ignore[arg-type]
    with pytest.raises(SourceCorrupt, match="not the one that was asked for"):
        check_manifest(SHARED_MANIFEST, **{**right, **wrong})  # type: ignore[arg-type]


def test_newcomers_begin_with_different_members() -> None:
    peers = [Source(f"w{i}") for i in range(3)]
    assert [ask_order(peers, me=i)[0] for i in (3, 4, 5)] == ["w0", "w1", "w2"]
    assert sorted(ask_order(peers, me=7)) == ["w0", "w1", "w2"]
    assert ask_order([], me=1) == []


def test_a_source_that_was_given_up_is_told_so() -> None:
    scheduler = new_scheduler("w0", "w1")
    scheduler.add_source("w0", SHARED_MANIFEST, INNER_MANIFEST)
    claim = scheduler.claim("w0")
    assert claim is not None
    scheduler.remove_source("w0")
    with pytest.raises(SourceFailed, match="already dropped"):
        scheduler.store_chunk("w0", claim.image, 0, chunk_of(SHARED_DATA, 0))
    with pytest.raises(SourceFailed, match="already dropped"):
        scheduler.claim("w0")


def test_differing_members_give_all_from_one_donor() -> None:
    other = manifest_of(data_of("shared", seed=1))
    scheduler = new_scheduler("w0", "w1")
    scheduler.add_source("w0", SHARED_MANIFEST, INNER_MANIFEST, identical=False)
    scheduler.add_source("w1", other, INNER_MANIFEST, identical=False)
    first = scheduler.claim("w0")
    assert first is not None
    store_chunk(scheduler, "w0", first.image, first.indices[0])
    waiting: list[str] = []

    def stand_by() -> None:
        claim = scheduler.claim("w1")
        assert claim is not None
        assert scheduler.shared is not None
        waiting.append(scheduler.shared.root)

    thread = threading.Thread(target=stand_by)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    scheduler.remove_source("w0")
    thread.join(PATIENCE_S)
    assert waiting == [other.root]
    assert scheduler.donors == set()


def test_donors_that_leave_after_the_end_change_nothing() -> None:
    manifests = [manifest_of(data_of("shared", seed=seed)) for seed in range(3)]
    datas = [data_of("shared", seed=seed) for seed in range(3)]
    scheduler = new_scheduler("w0", "w1", "w2")
    for number, manifest in enumerate(manifests):
        scheduler.add_source(f"w{number}", manifest, INNER_MANIFEST, identical=False)
    while not scheduler.finished:
        work = scheduler.claim("w0")
        assert work is not None
        data = INNER_DATA if work.image is scheduler.inner else datas[0]
        for index in work.indices:
            scheduler.store_chunk("w0", work.image, index, chunk_of(data, index))
        scheduler.release_chunks("w0")
    fetched = scheduler.shared
    for member in ("w0", "w1", "w2"):
        scheduler.remove_source(member)
    assert scheduler.complete
    assert scheduler.shared is fetched
    assert scheduler.donors == {"w0"}


def test_a_late_chunk_changes_nothing_of_the_next_attempt() -> None:
    scheduler = new_scheduler("w0")
    scheduler.add_source("w0", SHARED_MANIFEST, INNER_MANIFEST)
    while (work := scheduler.claim("w0")) is not None and work.image is not scheduler.shared:
        for index in work.indices:
            store_chunk(scheduler, "w0", work.image, index)
    assert work is not None
    scheduler.stop()
    image = work.image
    image.restart()
    assert image.claim("w0", most=9, now=0.0) == [0, 1, 2, 3, 4]
    store_chunk(scheduler, "w0", image, work.indices[0])
    scheduler.release_chunks("w0")
    scheduler.remove_source("w0")
    assert image.done_bytes == 0
    assert image.unassigned == 0


def test_donors_whose_state_does_not_fit_are_dropped() -> None:
    scheduler = new_scheduler("w0", "w1")
    scheduler.add_source("w0", SHARED_MANIFEST, INNER_MANIFEST, identical=False)
    larger = msgspec.structs.replace(SHARED_MANIFEST, nbytes=2**60)
    scheduler.add_source("w1", larger, INNER_MANIFEST, identical=False)
    scheduler.remove_source("w0")
    assert scheduler.finished
    assert not scheduler.complete
