"""Measuring the way to the hub."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.clock import VirtualClock
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.endpoint import HubEndpoint
from atoll.net.http.client import HubClient
from atoll.node.machine import bandwidth as speed_module
from atoll.node.machine.bandwidth import (
    MOST_S,
    SIZES,
    Bandwidth,
    BandwidthWatch,
    _direction,
    measure_bandwidth,
)
from tests.node.running import until
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    with HubServer(HubOptions(data=folder / "hub", jobs=folder / "runs", reducers=False)) as made:
        yield made


class Line:
    """A line of a known speed on a virtual clock, with a round trip of its own."""

    def __init__(self, bps: float, *, round_trip_s: float = 0.05) -> None:
        self.clock = VirtualClock()
        self.bps, self.round_trip_s = bps, round_trip_s
        self.nbytes = 0

    def __call__(self, nbytes: int) -> float:
        self.nbytes += nbytes
        self.clock.advance(self.round_trip_s + nbytes * 8 / self.bps)
        return 0.0


@pytest.mark.parametrize("bps", [2e5, 1e6, 10e6, 100e6])
def test_all_line_speeds_are_measured_with_few_bytes(bps: float) -> None:
    line = Line(bps)
    assert _direction(line, line.clock.monotonic) == pytest.approx(bps, rel=0.2)
    assert line.clock.monotonic() - 1000.0 < MOST_S + 0.3
    assert line.nbytes <= sum(SIZES) + 2 <= 2 * 2**20


def test_a_real_way_is_measured_and_a_capped_one_shows_its_cap(hub: HubServer) -> None:
    with HubClient(hub.url, hub.operator_token) as client:
        until(lambda: slowest(measure_bandwidth(client)) > FREE_BPS)
    with HubClient(hub.url, hub.operator_token, endpoint=HubEndpoint(upload_bps=8e6)) as client:
        until(lambda: is_capped(measure_bandwidth(client)))


FREE_BPS = 50e6
"""Loopback is faster, in every moment in which a busy machine lets both sides run."""


def slowest(found: Bandwidth) -> float:
    return min(found.up_bps, found.down_bps)


def is_capped(found: Bandwidth) -> bool:
    return 6e6 < found.up_bps < 10e6 and found.down_bps > FREE_BPS


class Watched:
    """Runs a watch on a virtual clock; each wait of it is a tick."""

    def __init__(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hub = hub
        self.clock = VirtualClock()
        self.found: list[Bandwidth] = []
        self.free, self.metered, self.address = True, False, "192.0.2.1"
        monkeypatch.setattr(speed_module, "LOOK_S", 0.01)
        monkeypatch.setattr(speed_module, "own_address", lambda _url: self.address)
        self.watch = BandwidthWatch(
            hub.url,
            open_client=lambda: HubClient(hub.url, hub.operator_token),
            is_free=lambda: self.free,
            is_metered=lambda: self.metered,
            on_speed=self.found.append,
            clock=self.clock,
        )

    async def reaches(self, count: int) -> bool:
        """Return whether so many measurements are made within a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S if count else 5.0):
                while len(self.found) < count:
                    await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # no further one follows
        return len(self.found) == count


def test_bandwidth_is_measured_hourly_and_per_network(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        watched = Watched(hub, monkeypatch)
        watched.free = False  # a job runs: it has the line for itself
        running = asyncio.create_task(watched.watch.run())
        assert await watched.reaches(0)
        watched.free = True
        assert await watched.reaches(1)
        watched.clock.advance(3600.0)
        assert await watched.reaches(2)
        watched.address = "192.0.2.77"
        assert await watched.reaches(3)
        watched.metered = True
        watched.clock.advance(3600.0)
        await asyncio.sleep(0.2)
        assert len(watched.found) == 3
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_a_hub_that_is_away_is_measured_later(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario() -> None:
        watched = Watched(hub, monkeypatch)
        away = BandwidthWatch(
            "http://127.0.0.1:9",
            open_client=lambda: HubClient("http://127.0.0.1:9", "t", timeout_s=1.0),
            is_free=lambda: True,
            is_metered=lambda: False,
            on_speed=watched.found.append,
        )
        running = asyncio.create_task(away.run())
        await asyncio.sleep(0.2)
        assert not running.done()
        assert not watched.found
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
