"""Sources that die, freeze or fall behind in the middle: processes, real sockets, real signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from atoll.checkpoint.format.memory_image import image_nbytes
from atoll.recovery import chunk_scheduler, donor_session
from atoll.recovery.direct_source import DirectSource
from tests.group.hub_world import NodeInName
from tests.patience import PATIENCE_S, PROMPT_S
from tests.recovery import spoil
from tests.recovery.world import LOCAL, World, assert_same, node_of_a_hub

NUMEL = 2_000_000
FOR_EVER_S = 10 * PATIENCE_S


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeInName]:
    """A hub that misses the killed almost at once, and the frozen never."""
    folder = tmp_path_factory.mktemp("hub")
    with node_of_a_hub(folder, reconnect_grace_s=0.3, dead_after_s=FOR_EVER_S) as node:
        yield node


@pytest.fixture(autouse=True)
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give sources that are away up sooner than usual, and soon decide without the frozen."""
    monkeypatch.setattr("atoll.recovery.relay_source.AWAY_S", 0.5)
    monkeypatch.setattr("atoll.recovery.fetch.COMPARE_S", 0.5)


@pytest.fixture
def w0_may_not_be_silent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give w0 up when it is silent for 2 s; the others may be slow on a busy machine."""

    class Source(DirectSource):
        def _connect(self) -> None:
            super()._connect()
            if f"{LOCAL}:{self._connection.port}" not in world.dials["w0"]:
                self._socket.settimeout(FOR_EVER_S)

    monkeypatch.setattr("atoll.recovery.direct_source.SILENT_S", 2.0)
    monkeypatch.setattr(donor_session, "DirectSource", Source)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
@pytest.mark.every(2)
def test_killed_donors_chunks_come_from_others(world: World, direct: bool) -> None:
    models = world.processes_of("w0", "w1", "w2", direct=direct, numel=NUMEL)
    found = world.recover(at=[(0.15, lambda: world.kill("w0")), (0.5, lambda: world.kill("w1"))])
    shared, inner = (image_nbytes(part) for part in models[2].parts())
    assert_same(found.shared, models[0].shared())
    assert found.inner is not None
    assert any(found.inner.tensors["a"].equal(m.inner().tensors["a"]) for m in models)
    assert shared + inner <= found.nbytes <= shared + 3 * inner
    assert world.events_of("recovery-source-refused") == {}


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
@pytest.mark.every(2)
def test_chunks_of_a_dead_donor_are_not_fetched_again(
    world: World, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No optimizer state before it dies: what came of that is fetched again from another donor.
    monkeypatch.setattr(chunk_scheduler, "MEASURED_CHUNKS", 10**6)
    _, model = world.processes_of("w0", "w1", direct=direct, numel=NUMEL)
    world.gone.add("w1")

    def swap() -> None:
        world.kill("w0")
        world.gone.discard("w1")

    found = world.recover(at=[(0.1, swap)])  # what was asked for until then is not all of it
    shared, inner = (image_nbytes(part) for part in model.parts())
    assert_same(found.shared, model.shared())
    assert_same(found.inner, model.inner())
    assert found.nbytes == shared + inner
    assert list(world.events_of("recovery-source-lost")) == ["w0"]
    assert world.requests[1:] == [["w0"]]


@pytest.mark.usefixtures("w0_may_not_be_silent")
def test_a_frozen_donor_is_dropped_and_the_others_go_on(world: World) -> None:
    model, _ = world.processes_of("w0", "w1", numel=NUMEL)
    began = time.monotonic()
    found = world.recover(at=[(0.1, lambda: world.kill("w0", signal.SIGSTOP))])
    assert_same(found.shared, model.shared())
    assert found.inner is not None
    assert time.monotonic() - began < PROMPT_S
    world.kill("w0", signal.SIGCONT)


def test_a_donor_frozen_from_the_start_holds_nobody_up(world: World) -> None:
    _, model = world.processes_of("w0", "w1", numel=NUMEL)
    world.kill("w0", signal.SIGSTOP)
    began = time.monotonic()
    found = world.recover()
    assert_same(found.inner, model.inner())
    assert found.sources == ["w1"]
    assert time.monotonic() - began < PROMPT_S
    world.kill("w0", signal.SIGCONT)


def test_the_last_chunks_of_a_slow_donor_are_taken_from_another(world: World) -> None:
    over = threading.Event()
    world.donor("w0", spoil=spoil.after(over.is_set), numel=NUMEL)
    model = world.donor("w1", numel=NUMEL)
    found = world.recover()
    over.set()
    assert_same(found.shared, model.shared())
    assert found.sources == ["w1"]


def test_a_donor_whose_state_raises_is_dropped_by_name(world: World) -> None:
    broken = world.donor("w0")
    broken.parts = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    model = world.donor("w1")
    assert_same(world.recover().shared, model.shared())


def test_a_member_that_left_refuses_and_is_dropped(world: World) -> None:
    world.donor("w0", spoil=spoil.answers(status="refused", reason="this member is leaving"))
    model = world.donor("w1", spoil=spoil.after(lambda: world.events))
    assert_same(world.recover().shared, model.shared())
    assert "this member is leaving" in world.events_of("recovery-source-lost")["w0"]
