"""A member takes over the state of others that live and train on."""

from __future__ import annotations

import threading
import time

import pytest

from atoll.checkpoint.format.memory_image import image_nbytes
from atoll.errors import DeadlineExceeded, GroupLeft
from atoll.recovery import partial_state
from atoll.recovery.relay_source import RelaySource
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.recovery_messages import CHUNK, StateAsk
from tests.patience import PATIENCE_S, PROMPT_S
from tests.recovery import spoil
from tests.recovery.world import LOCAL, World, assert_same, deadline_after, wait_until


@pytest.mark.parametrize("direct", [(1, 1, 1), (0, 0, 0), (1, 0, 1)], ids=str)
@pytest.mark.every(2)
def test_the_state_comes_whole_from_all_sources_on_every_way(
    world: World, direct: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each gives the chunks it was asked for, and no other does in its stead if it is slow.
    monkeypatch.setattr(partial_state, "DUPLICATE_AFTER_S", PATIENCE_S)
    gates = spoil.together(3)
    models = [
        world.donor(f"w{slot}", direct=bool(direct[slot]), spoil=gates, numel=1_500_000)
        for slot in range(3)
    ]
    found = world.recover()
    assert_same(found.shared, models[0].shared())
    assert found.inner is not None
    assert any(found.inner.tensors["a"].equal(m.inner().tensors["a"]) for m in models)
    assert (found.round, found.base) == (3, "base-3")
    assert found.sources == ["w0", "w1", "w2"]
    assert found.nbytes == sum(image_nbytes(part) for part in models[0].parts())
    # Threads tell it in any order, the last one perhaps after the end.
    wait_until(lambda: max(world.progress) == found.nbytes)
    assert world.events == []
    assert found.answer.round == 3


def test_tiny_state_is_recovered_from_one_donor(world: World) -> None:
    model = world.donor("w1", numel=1)
    found = world.recover()
    assert_same(found.shared, model.shared())
    assert_same(found.inner, model.inner())
    assert found.sources == ["w1"]


def test_undialable_donor_is_reached_through_the_hub(world: World) -> None:
    model = world.donor("w0", direct=False)
    world.dials["w0"] = ["nonsense", f"{LOCAL}:1", "127.0.0.1:99999"]
    assert_same(world.recover().shared, model.shared())


def test_a_port_of_another_program_is_no_obstacle(world: World) -> None:
    model = world.donor("w0", direct=False)
    world.dials["w0"] = [f"{LOCAL}:{world.hub.port}"]
    assert_same(world.recover().shared, model.shared())


def test_without_donors_the_checkpoint_is_named(world: World) -> None:
    found = world.recover()
    assert (found.shared, found.inner, found.sources) == (None, None, [])
    assert found.answer.checkpoint_round == 2


def test_lagging_donor_is_waited_for(world: World) -> None:
    model = world.donor("w0", round_=2)
    timer = threading.Timer(0.5, lambda: model.move_to(3))
    timer.start()
    assert_same(world.recover().shared, model.shared())
    assert model.round == 3
    timer.join()


def test_donor_in_mid_step_is_waited_for(world: World) -> None:
    model = world.donor("w0")
    inside, out = threading.Event(), threading.Event()

    def step() -> None:
        with world.state_locks["w0"].moving():
            looks = model.looks
            inside.set()
            out.wait(PATIENCE_S)
            assert model.looks == looks

    trainer = threading.Thread(target=step)
    trainer.start()
    inside.wait(PATIENCE_S)
    timer = threading.Timer(0.3, out.set)
    timer.start()
    assert_same(world.recover().shared, model.shared())
    assert out.is_set()
    trainer.join()
    timer.join()


def test_donor_keeps_giving_the_round_it_began(world: World) -> None:
    model = world.donor("w0", numel=1_000_000)
    expected = model.shared()
    found = world.recover(at=[(0.2, lambda: model.move_to(4))])
    assert found.round == 3
    assert_same(found.shared, expected)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
@pytest.mark.every(2)
def test_newer_round_is_fetched_if_the_older_is_gone(world: World, direct: bool) -> None:
    model = world.donor("w0", direct=direct, numel=6_000_000)
    cache = world.donors["w0"]._cache

    def move() -> None:
        model.move_to(4)
        world.round = 4
        with cache._condition:
            cache._rounds.clear()

    found = world.recover(at=[(0.3, move)])
    assert (found.round, found.base) == (4, "base-4")
    assert_same(found.shared, model.shared())
    assert world.events == []
    assert world.requests == [[], []]


def stuck(world: World, over: threading.Event) -> spoil.Spoil:
    """Return donors that give their first chunks, and the others when it is over."""
    return spoil.after(lambda: not world.progress or over.is_set())


def test_giving_up_ends_all_threads_at_once(world: World) -> None:
    over = threading.Event()
    world.donor("w0", spoil=stuck(world, over))
    stopped = threading.Event()
    began = time.monotonic()
    with pytest.raises(GroupLeft, match="cancelled"):
        world.recover(at=[(0.01, stopped.set)], stop=stopped.is_set)
    assert time.monotonic() - began < PROMPT_S
    over.set()


def test_the_deadline_ends_a_recovery_and_says_how_far_it_came(world: World) -> None:
    over = threading.Event()
    world.donor("w0", spoil=stuck(world, over))
    with (
        deadline_after(lambda: world.progress),
        pytest.raises(DeadlineExceeded, match=r"[1-9]\d* bytes came from 1 members"),
    ):
        world.recover()
    over.set()


def test_members_that_are_distrusted_are_named_to_the_hub(world: World) -> None:
    for member in ("w0", "w1"):
        world.donor(member)
    assert world.recover(distrusted=["w0"]).sources == ["w1"]
    assert world.requests == [["w0"]]


def test_several_newcomers_share_the_images_of_a_donor(world: World) -> None:
    model = world.donor("w0", numel=1_000_000)
    model.looks = 0
    link = world.link("w1")
    other = RelaySource(link, address=f"{world.job}/w0")
    assert_same(world.recover().shared, model.shared())
    answer, body = other.ask(StateAsk(0, CHUNK, 3, "shared", 0))
    assert (answer.status, len(body)) == ("ok", 256 * 2**10)
    assert model.looks == 2  # once for the sizes, once for the copy
    other.close()


def test_a_broken_link_of_the_newcomer_loses_nothing(world: World) -> None:
    model = world.donor("w0", direct=False, numel=3_000_000)
    world.link(world.me, proxied=True)
    proxy = world.proxies[-1]
    found = world.recover(at=[(0.2, lambda: proxy.cut_after(100_000))])
    assert proxy.cuts == 1
    assert_same(found.shared, model.shared())
    assert found.nbytes == sum(image_nbytes(part) for part in model.parts())
    assert world.events == []


def test_a_broken_link_of_a_donor_loses_nothing(world: World) -> None:
    model = world.donor("w0", direct=False, proxied=True, numel=3_000_000)
    proxy = world.proxies[-1]
    found = world.recover(at=[(0.2, lambda: proxy.cut_after(100_000))])
    wait_until(lambda: proxy.cuts == 1)
    assert_same(found.shared, model.shared())
    assert world.events_of("recovery-source-refused") == {}


def test_differing_members_recover_from_one_donor(world: World) -> None:
    models = [world.donor(f"w{slot}", numel=600_000, seed=slot + 1) for slot in range(3)]
    for model in models:
        model.identical = False
    found = world.recover()
    (source,) = found.sources
    assert_same(found.shared, models[int(source[1:])].shared())
    assert_same(found.inner, models[int(source[1:])].inner())
    assert world.events == []


def test_lone_claim_to_differ_is_not_believed(world: World) -> None:
    gates, late = spoil.at_once(3), spoil.after(lambda: world.events)
    models = [
        world.donor(
            f"w{slot}",
            spoil=gates if slot == 0 else lambda answer: late(gates(answer)),
            numel=600_000,
            seed=int(slot == 0),
        )
        for slot in range(3)
    ]
    models[0].identical = False
    found = world.recover()
    assert_same(found.shared, models[1].shared())
    assert "w0" not in found.sources
    assert list(world.events_of("recovery-source-refused")) == ["w0"]


def test_of_a_newer_state_only_what_has_changed_is_fetched(world: World) -> None:
    model = world.donor("w0", numel=1_000_000)
    older = world.recover()
    whole, inner = (image_nbytes(part) for part in model.parts())
    assert older.nbytes == whole + inner
    assert older.again_s == pytest.approx(older.seconds * whole / (whole + inner))
    changed = dict(model.shared().tensors)
    changed["a"] = changed["a"].clone()
    changed["a"][-1000:] += 1.0
    model.move_to(4)
    model._made[model.seed * 1000 + 4] = changed
    world.round = 4
    found = world.recover(older=older)
    assert found.round == 4
    assert_same(found.shared, model.shared())
    assert found.nbytes <= 3 * CHUNK_BYTES
    assert_same(found.inner, model.inner(3))
    assert world.events == []


def test_of_differing_members_nothing_is_used_again(world: World) -> None:
    model = world.donor("w0", numel=1_000_000)
    model.identical = False
    older = world.recover()
    model.move_to(4)
    world.round = 4
    found = world.recover(older=older)
    assert_same(found.shared, model.shared())
    assert_same(found.inner, model.inner())
