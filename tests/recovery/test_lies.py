"""What a donor must not send is found, named, and costs the newcomer nothing but time."""

from __future__ import annotations

import os
import re
import threading

import pytest

from atoll.clock import RealClock
from atoll.errors import DeadlineExceeded
from atoll.recovery.http_server import Answerer
from atoll.wire.recovery_messages import (
    CHUNK,
    MANIFEST,
    OFFER,
    ImageOffer,
    StateAnswer,
    StateAsk,
    encode_state_manifest,
    state_manifest,
)
from tests.patience import PATIENCE_S
from tests.recovery import spoil
from tests.recovery.world import World, assert_same, deadline_after

NUMEL = 600_000


def flipped(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 1
    return data


LIES: dict[str, tuple[spoil.Spoil, str]] = {
    "a flipped bit": (spoil.chunks(flipped), "chunk of (shared|inner) is damaged"),
    "noise": (spoil.chunks(lambda data: os.urandom(len(data))), "is damaged"),
    "less": (spoil.chunks(lambda data: data[:-1]), "wrong size"),
    "more": (spoil.chunks(lambda data: data + b"x"), "wrong size|more than was requested"),
    "another job": (spoil.manifests(job="other"), "not the one that was asked for"),
    "another round": (spoil.manifests(round=2), "not the one that was asked for"),
    "another base": (spoil.manifests(base="x"), "not the one that was asked for"),
    "another image": (spoil.manifests(name="outer"), "not the one that was asked for"),
    "a larger image": (spoil.manifests(nbytes=2**50), "manifest is malformed"),
    "fewer digests": (spoil.manifests(digests=b""), "manifest is malformed"),
    "other digests": (spoil.manifests(digests=bytes(160)), "is damaged|differs"),
    "an empty offer": (spoil.answers(images=[]), "offer is incomplete"),
    "a huge manifest": (
        spoil.answers(images=[ImageOffer(name, 2**60, "x", 2**50) for name in ("shared", "inner")]),
        "offer is incomplete",
    ),
    "another manifest than offered": (
        spoil.answers(images=[ImageOffer(n, 100, "x", 500) for n in ("shared", "inner")]),
        "not the one it offered|longer than it said",
    ),
}


ON_BOTH_WAYS = ("a flipped bit", "noise", "less", "more")
"""The others are about offers and manifests, which are checked alike."""


@pytest.mark.parametrize(
    ("lie", "direct"), [*((lie, True) for lie in LIES), *((lie, False) for lie in ON_BOTH_WAYS)]
)
@pytest.mark.every(2)
def test_liar_is_named_and_state_comes_from_others(world: World, lie: str, direct: bool) -> None:
    change, reason = LIES[lie]
    world.donor("w0", spoil=change, direct=direct, numel=NUMEL)
    late = spoil.after(lambda: world.events)
    model = world.donor("w1", spoil=late, numel=NUMEL)
    world.donor("w2", spoil=late, numel=NUMEL)
    found = world.recover()
    assert_same(found.shared, model.shared())
    assert found.inner is not None
    refused = world.events_of("recovery-source-refused")
    assert list(refused) == ["w0"]
    assert re.search(reason, refused["w0"]), refused
    assert "w0 was dropped as a source" in world.events[0].text


def test_a_state_that_differs_from_that_of_the_others_is_refused(world: World) -> None:
    late = spoil.after(lambda: world.events)
    model = world.donor("w1", numel=NUMEL, spoil=late)
    world.donor("w0", numel=NUMEL, seed=5)
    world.donor("w2", numel=NUMEL, spoil=late)
    found = world.recover()
    assert_same(found.shared, model.shared())
    assert set(found.sources) <= {"w1", "w2"}
    assert "differs" in world.events_of("recovery-source-refused")["w0"]


def test_a_fast_liar_does_not_win_before_the_others_have_spoken(world: World) -> None:
    """The liar has delivered everything before the honest two say what they have."""
    world.donor("w0", numel=1000, seed=5)
    models = [world.donor(f"w{slot}", numel=1000) for slot in (1, 2)]
    busy = [world.state_locks[f"w{slot}"].moving() for slot in (1, 2)]
    for gate in busy:
        gate.__enter__()
    world.events.clear()

    def rest() -> None:
        for gate in busy:
            gate.__exit__(None, None, None)

    found = world.recover(at=[(0.5, rest)])
    assert_same(found.shared, models[0].shared())
    assert "w0" not in found.sources
    assert world.events_of("recovery-source-refused").keys() <= {"w0"}


def garbage(job: str, data: bytes) -> spoil.Spoil:
    """Return donors that give bytes which are no state, with all the right digests."""
    view = memoryview(data)

    def spoilt(answer: Answerer) -> Answerer:
        def wrong(ask: StateAsk) -> tuple[StateAnswer, memoryview]:
            name = ask.image or "shared"
            made = {
                name: state_manifest(view, job=job, round_=ask.round, base="base-3", name=name)
                for name in ("shared", "inner")
            }
            if ask.kind == OFFER:
                images = [
                    ImageOffer(n, m.nbytes, m.root, len(encode_state_manifest(m)))
                    for n, m in made.items()
                ]
                given = StateAnswer(ask.number, "ok", ask.round, base="base-3", images=images)
                return given, memoryview(b"")
            given = StateAnswer(ask.number, "ok", ask.round, image=name, index=ask.first)
            if ask.kind == MANIFEST:
                return given, memoryview(encode_state_manifest(made[name]))
            assert ask.kind == CHUNK
            return given, view

        return wrong

    return spoilt


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
@pytest.mark.every(2)
def test_invalid_state_is_refused_despite_right_digests(world: World, direct: bool) -> None:
    world.donor("w0", spoil=garbage(world.job, b"\xff" * 5000), direct=direct)
    with deadline_after(lambda: world.events), pytest.raises(DeadlineExceeded):
        world.recover()
    assert "cannot be read" in world.events_of("recovery-source-refused")["w0"]
    model = world.donor("w1")
    assert_same(world.recover().shared, model.shared())


def test_noise_instead_of_answers_is_refused(world: World) -> None:
    world.links["w0"] = link = world.link("w0")
    world.dials["w0"] = []
    inbox = link.subscribe()
    model = world.donor("w1", spoil=spoil.after(lambda: world.events or not noisy.is_set()))
    noisy = threading.Event()
    deadline = RealClock().monotonic() + PATIENCE_S

    def noise(*_: object) -> None:
        for junk in (b"\xff\xffS!", b"\xff\xffS!\xff\xff", b"\xff\xffS!\x00\x05hello", b"hello"):
            link.relay(f"{world.job}/{world.me}", (junk, b""), deadline=deadline)
        noisy.set()

    found = world.recover(at=[(0.01, noise)])
    assert_same(found.shared, model.shared())
    assert "w0" in world.events_of("recovery-source-refused")
    inbox.close()
