"""How fast the way to the hub is: measured at the start, every hour, and on another network."""

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
"""Bytes of one try after the other, each way: 2.3 MB in all, over slow lines only the first."""

MOST_S = 1.0
"""Seconds for one direction; a larger try is made only if it will fit into what is left."""

EVERY_S = 3600.0

LOOK_S = 15.0
"""Pause between two looks at whether it is time, or the network another one."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bits per second between this machine and its hub."""

    up_bps: float
    down_bps: float


def measure_bandwidth(
    client: HubClient, *, monotonic: Callable[[], float] = time.monotonic
) -> Bandwidth:
    """Return the speed of both directions; takes about 2 s at most, and 2.3 MB.

    Raises:
        HubUnreachable: the hub does not answer.
    """
    return Bandwidth(
        up_bps=_direction(client.upload_bps, monotonic),
        down_bps=_direction(client.download_bps, monotonic),
    )


def _direction(transfer: Callable[[int], float], monotonic: Callable[[], float]) -> float:
    """Return the speed of the largest transfer for which there was time."""
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
    """Return this machine's address towards a hub; empty: there is no way. Nothing is sent."""
    place = hub_address(url)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


class BandwidthWatch:
    """Measures again when it is time."""

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
        """Measure nothing yet.

        Args:
            url: The hub.
            open_client: Opens a client of it.
            is_free: Whether nothing else uses the network now; called on the loop.
            is_metered: Whether it costs money now; called in a thread.
            on_speed: Gets each result; called on the loop.
            clock: Source of time.
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
        """Return whether that is done for now."""
        try:
            speed = await run_abandonable(self._measured)
        except AtollError as error:
            log.info("the speed of the way to the hub was not measured: %s", error)
            return False
        if speed is not None:
            log.info(
                "the way to the hub: %.1f Mbit/s up, %.1f down",
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
