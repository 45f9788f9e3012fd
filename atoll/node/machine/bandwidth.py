"""Bandwidth to the hub: measured at the start, every hour, and after a change of the network."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from atoll.clock import Clock, RealClock
from atoll.errors import AtollError
from atoll.net.http.client import HubClient
from atoll.net.proxies import hub_address
from atoll.node.processes.threads import run_abandonable

log = logging.getLogger(__name__)

SIZES = (16 * 2**10, 128 * 2**10, 1 * 2**20)
"""Bytes of successive transfers per direction: 2.3 MB in all, on slow links only the first."""

MOST_S = 1.0
"""Time limit per direction; a larger transfer starts only if it will fit."""

EVERY_S = 3600.0

LOOK_S = 15.0
"""Interval of checks whether a measurement is due or the network has changed."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bits per second between this machine and its hub."""

    up_bps: float
    down_bps: float


def measure_bandwidth(
    client: HubClient, *, monotonic: Callable[[], float] = time.monotonic
) -> Bandwidth:
    """Measure both directions, with 2.3 MB in about 2 s at most; raises HubUnreachable."""
    return Bandwidth(
        up_bps=_direction(client.upload_bps, monotonic),
        down_bps=_direction(client.download_bps, monotonic),
    )


def _direction(transfer: Callable[[int], float], monotonic: Callable[[], float]) -> float:
    """Return the speed of the largest transfer that fits into the time limit."""
    transfer(1)  # opens the connection
    started = monotonic()
    transfer(1)
    empty_s = monotonic() - started
    deadline = started + MOST_S
    bps = 0.0
    for nbytes in SIZES:
        if bps and monotonic() + nbytes * 8 / bps + empty_s > deadline:
            break
        began = monotonic()
        transfer(nbytes)
        seconds = monotonic() - began
        bps = nbytes * 8 / max(seconds - empty_s, seconds / 4, 1e-6)
    return bps


def own_address(url: str) -> str:
    """Return this machine's local address on the route to a hub, or ""; nothing is sent."""
    hub = hub_address(url)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            hub.host, hub.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


class BandwidthWatch:
    """Repeats the measurement when it is due."""

    def __init__(
        self,
        url: str,
        *,
        open_client: Callable[[], HubClient],
        is_free: Callable[[], bool],
        is_metered: Callable[[], bool],
        on_speed: Callable[[Bandwidth], None],
        clock: Clock | None = None,
    ) -> None:
        """Prepare to measure while the network is free and not metered.

        `is_free` and `on_speed` are called on the loop, `is_metered` in a thread.
        """
        self._url = url
        self._open_client = open_client
        self._is_free = is_free
        self._is_metered = is_metered
        self._on_speed = on_speed
        self._clock = clock or RealClock()

    async def run(self) -> None:
        """Watch until cancelled."""
        measured_at, measured_from = -EVERY_S, ""
        while True:
            address = await run_abandonable(lambda: own_address(self._url))
            now = self._clock.monotonic()
            due = now - measured_at >= EVERY_S or address != measured_from
            if due and address and self._is_free() and await self._measure():
                measured_at, measured_from = now, address
            await asyncio.sleep(LOOK_S)

    async def _measure(self) -> bool:
        try:
            speed = await run_abandonable(self._measured)
        except AtollError as error:
            log.info("the bandwidth to the hub was not measured: %s", error)
            return False
        if speed is not None:
            log.info(
                "bandwidth to the hub: %.1f Mbit/s up, %.1f down",
                speed.up_bps / 1e6,
                speed.down_bps / 1e6,
            )
            self._on_speed(speed)
        return True

    def _measured(self) -> Bandwidth | None:
        if self._is_metered():
            return None
        with self._open_client() as client:
            return measure_bandwidth(client)
