"""A donor makes images when asked, shares them, keeps few, and hardly holds up its training."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from atoll.checkpoint.format.memory_image import part_of
from atoll.checkpoint.format.part import Part
from atoll.errors import DeadlineExceeded
from atoll.recovery.snapshot_cache import SnapshotCache
from atoll.state_lock import StateLock
from atoll.wire.recovery_messages import (
    CHUNK,
    GONE,
    MANIFEST,
    OFFER,
    OK,
    REFUSED,
    WAIT,
    StateAnswer,
    StateAsk,
    decode_state_manifest,
    state_manifest,
)
from tests.patience import PATIENCE_S
from tests.recovery.world import Model, assert_same, wait_until


@pytest.fixture
def cache() -> Iterator[SnapshotCache]:
    cache = SnapshotCache(job="j", key="k")
    yield cache
    cache.close()


def offered(cache: SnapshotCache, round_: int = 3) -> StateAnswer:
    """Ask until there is another answer than "wait"."""
    answers: list[StateAnswer] = []

    def ask() -> bool:
        answers.append(cache.answer(StateAsk(1, OFFER, round_))[0])
        return answers[-1].status != WAIT

    wait_until(ask)
    return answers[-1]


def test_chunks_and_manifest_are_those_of_the_parts(cache: SnapshotCache) -> None:
    model = Model("w0", numel=100_000)
    cache.offer(model, still=StateLock().still)
    assert cache.rounds == []
    offer = offered(cache)
    assert (offer.status, offer.round, offer.base, offer.key) == (OK, 3, "base-3", "k")
    for line, part in zip(offer.images, model.parts(), strict=True):
        _, data = cache.answer(StateAsk(1, MANIFEST, 3, line.name, 0, 16))
        manifest = decode_state_manifest(data)
        assert (manifest.root, manifest.nbytes) == (line.root, line.nbytes)
        assert (manifest.job, manifest.round, manifest.name) == ("j", 3, part.name)
        whole = bytearray()
        for index in range(manifest.count):
            answer, body = cache.answer(StateAsk(1, CHUNK, 3, line.name, index))
            assert (answer.status, answer.index) == (OK, index)
            assert manifest.fits(index, body)
            whole += body
        assert_same(part_of(whole, part.name), part)


@pytest.mark.parametrize(
    "ask",
    [
        StateAsk(1, CHUNK, 3, "shared", -1),
        StateAsk(1, CHUNK, 3, "shared", 2**62),
        StateAsk(1, CHUNK, 3, "shared", 0, 0),
        StateAsk(1, CHUNK, 3, "shared", 0, 17),
        StateAsk(1, CHUNK, 3, "shared", 0, -1),
        StateAsk(1, CHUNK, 3, "outer", 0),
        StateAsk(1, "secrets", 3, "shared", 0),
    ],
    ids=str,
)
def test_asks_outside_the_images_are_refused(cache: SnapshotCache, ask: StateAsk) -> None:
    cache.offer(Model("w0", numel=100), still=StateLock().still)
    offered(cache)
    answer, body = cache.answer(ask)
    assert (answer.status, len(body)) == (REFUSED, 0)


def test_a_donor_without_a_state_says_so(cache: SnapshotCache) -> None:
    assert cache.answer(StateAsk(1, OFFER, 3))[0].round == -1


def test_an_ask_for_another_round_is_answered_with_the_own_one(cache: SnapshotCache) -> None:
    model = Model("w0", numel=10)
    cache.offer(model, still=StateLock().still)
    for round_ in (2, 4):
        answer = offered(cache, round_)
        assert (answer.status, answer.round) == (GONE, 3)
    assert cache.rounds == []
    model.move_to(4)
    wait_until(lambda: offered(cache, 4).status == OK)


def test_images_of_at_most_two_rounds_are_kept(cache: SnapshotCache) -> None:
    model = Model("w0", numel=10)
    cache.offer(model, still=StateLock().still)
    for round_ in (3, 4, 5):
        model.move_to(round_)
        wait_until(lambda round_=round_: offered(cache, round_).status == OK)  # type: ignore[misc]
    assert cache.rounds == [4, 5]
    assert cache.answer(StateAsk(1, CHUNK, 4, "shared", 0))[0].status == OK
    assert offered(cache, 3).status == GONE


def test_images_that_nobody_asks_for_are_dropped() -> None:
    cache = SnapshotCache(job="j", idle_s=0.05)
    cache.offer(Model("w0", numel=10), still=StateLock().still)
    offered(cache)
    wait_until(lambda: cache.rounds == [])
    cache.close()


def test_many_asks_make_one_image(cache: SnapshotCache) -> None:
    model = Model("w0", numel=100_000)
    cache.offer(model, still=StateLock().still)
    model.looks = 0
    threads = [threading.Thread(target=offered, args=(cache,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.looks == 2


def test_the_state_is_looked_at_only_while_it_rests(cache: SnapshotCache) -> None:
    state_lock = StateLock()
    inside = threading.Event()

    class Watched(Model):
        def parts(self) -> tuple[Part, Part]:
            assert not inside.is_set()
            return super().parts()

    cache.offer(Watched("w0", numel=1000), still=state_lock.still)
    done = threading.Event()

    def train() -> None:
        while not done.is_set():
            with state_lock.moving():
                inside.set()
                time.sleep(0.001)
                inside.clear()

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        assert offered(cache).status == OK
    finally:
        done.set()
        trainer.join()


def test_image_is_consistent_while_the_state_changes(
    cache: SnapshotCache,
) -> None:
    state_lock, done = StateLock(), threading.Event()
    value = torch.zeros(300_000)

    class Counting(Model):
        def parts(self) -> tuple[Part, Part]:
            part = Part("shared", {"a": value, "b": value})
            return part, Part("inner", {"a": value})

    def train() -> None:
        while not done.is_set():
            with state_lock.moving():
                value.add_(1)

    cache.offer(Counting("w0", numel=1), still=state_lock.still)
    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        offer = offered(cache)
    finally:
        done.set()
        trainer.join()
    data = b"".join(
        bytes(cache.answer(StateAsk(1, CHUNK, 3, "shared", i, 1))[1]) for i in range(10)
    )
    assert len(data) == offer.images[0].nbytes
    tensors = part_of(data, "shared").tensors
    assert bool((torch.cat([tensors["a"], tensors["b"]]) == tensors["a"][0]).all())


def test_a_round_that_ends_between_the_two_looks_is_not_given(cache: SnapshotCache) -> None:
    model = Model("w0", numel=1000)
    state_lock, looks = StateLock(), [0]

    @contextmanager
    def still(*, timeout_s: float) -> Iterator[None]:
        looks[0] += 1
        if looks[0] == 2:
            model.move_to(4)
        with state_lock.still(timeout_s=timeout_s):
            yield

    cache.offer(model, still=still)
    answer = offered(cache)
    assert (answer.status, answer.round) == (GONE, 4)


def test_outcome_of_an_earlier_offer_is_not_given(cache: SnapshotCache) -> None:
    @contextmanager
    def still(*, timeout_s: float) -> Iterator[None]:
        yield
        cache.offer(Model("w0", numel=1), still=StateLock().still)  # the run was reset meanwhile

    earlier = Model("w0", numel=1)
    earlier.move_to(9)
    cache.offer(earlier, still=still)
    answer = offered(cache)
    assert (answer.status, answer.round) == (OK, 3)


def test_a_state_that_cannot_be_saved_is_refused_with_the_reason(cache: SnapshotCache) -> None:
    class Strange(Model):
        def parts(self) -> tuple[Part, Part]:
            odd = Part("shared", {"z": torch.zeros(1, dtype=torch.complex128)})
            return odd, odd

    cache.offer(Strange("w0", numel=1), still=StateLock().still)
    answer = offered(cache)
    assert answer.status == REFUSED
    assert "tensor z cannot be saved" in answer.reason


def test_a_state_that_raises_is_refused_and_the_donor_goes_on(cache: SnapshotCache) -> None:
    class Broken(Model):
        def parts(self) -> tuple[Part, Part]:
            raise RuntimeError("not today")

    broken = Broken.__new__(Broken)
    broken.round, broken.base = 3, "b"
    cache.offer(broken, still=StateLock().still)
    assert "RuntimeError: not today" in offered(cache).reason
    cache.offer(Model("w0", numel=1), still=StateLock().still)
    assert offered(cache).status == OK


def test_a_state_that_never_rests_leaves_the_asker_waiting(cache: SnapshotCache) -> None:
    requested = threading.Event()

    @contextmanager
    def still(*, timeout_s: float) -> Iterator[None]:
        requested.set()
        raise DeadlineExceeded("the state did not come to rest in time")
        yield

    cache.offer(Model("w0", numel=1), still=still)
    assert cache.answer(StateAsk(1, OFFER, 3))[0].status == WAIT
    assert requested.wait(PATIENCE_S)
    assert cache.answer(StateAsk(1, OFFER, 3))[0].status == WAIT


def test_a_closed_shelf_refuses() -> None:
    cache = SnapshotCache(job="j")
    cache.offer(Model("w0", numel=1), still=StateLock().still)
    cache.close()
    assert cache.answer(StateAsk(1, OFFER, 3))[0].status == REFUSED


def test_donors_of_one_state_offer_one_image() -> None:
    roots = []
    for member in ("w0", "w1"):
        cache = SnapshotCache(job="j")
        cache.offer(Model(member, numel=1000), still=StateLock().still)
        roots.append([line.root for line in offered(cache).images])
        cache.close()
    assert roots[0][0] == roots[1][0]
    assert roots[0][1] != roots[1][1]


def test_training_waits_for_the_copies_and_not_for_digests(
    cache: SnapshotCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_lock, hashing, go_on = StateLock(), threading.Event(), threading.Event()

    def slow(*args: object, **options: object) -> object:
        hashing.set()
        assert go_on.wait(PATIENCE_S)
        return state_manifest(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("atoll.recovery.snapshot_cache.state_manifest", slow)
    cache.offer(Model("w0", numel=1000), still=state_lock.still)
    assert cache.answer(StateAsk(1, OFFER, 3))[0].status == WAIT
    assert hashing.wait(PATIENCE_S)
    with state_lock.moving():  # would wait for ever
        go_on.set()
    assert offered(cache).status == OK


def test_rolled_back_state_is_not_given_from_old_images(cache: SnapshotCache) -> None:
    """The same number of rounds may come again with another state."""
    model = Model("w0", numel=10)
    cache.offer(model, still=StateLock().still)
    first = offered(cache)
    model.base, model.seed = "other", 9
    wait_until(lambda: offered(cache).base == "other")
    assert offered(cache).images[0].root != first.images[0].root
    model.move_to(2)
    wait_until(lambda: offered(cache, 2).status == OK)
    wait_until(lambda: offered(cache).status == GONE)
