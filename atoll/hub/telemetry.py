"""Exports the hub's metrics to an OpenTelemetry collector: `atoll hub --otlp URL`.

The metrics have the names of /metrics. They are collected on the hub's event loop and sent by the
library's thread, so an unresponsive collector delays nothing. Requires the extra `otel`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from atoll.errors import ConfigError
from atoll.hub.http.context import Context
from atoll.hub.http.metric_families import Family, families

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

logger = logging.getLogger(__name__)

EXPORT_EVERY_S = 15.0
SEND_TIMEOUT_S = 5.0


class Telemetry:
    """Collects and exports metrics until it is closed.

    `/v1/metrics` is added to a `url` without path. Raises ConfigError if the libraries are not
    installed or the address is invalid.
    """

    def __init__(self, context: Context, *, url: str, every_s: float = EXPORT_EVERY_S) -> None:
        self._context = context
        self._every_s = every_s
        self._latest: dict[str, Family] = {}
        self._known: set[str] = set()
        self._provider: Any = None
        self._meter: Any = None
        self._open(_metrics_url(url))

    def _open(self, url: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise ConfigError(
                "the hub cannot send OpenTelemetry",
                given=str(error),
                remedy="pip install 'atoll[otel]', or start the hub without --otlp",
            ) from error
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=url, timeout=SEND_TIMEOUT_S),
            export_interval_millis=self._every_s * 1000,
            export_timeout_millis=SEND_TIMEOUT_S * 1000,
        )
        resource = Resource.create(
            {"service.name": "atoll-hub", "service.version": self._context.version}
        )
        self._provider = MeterProvider(
            metric_readers=[reader], resource=resource, shutdown_on_exit=False
        )
        self._meter = self._provider.get_meter("atoll.hub")

    async def run(self) -> None:
        """Collect metrics until cancelled."""
        while True:
            try:
                await self.gather()
            except Exception:
                logger.exception("metrics for OpenTelemetry could not be collected")
            await asyncio.sleep(self._every_s / 2)

    async def gather(self) -> None:
        """Collect the metrics that the next export sends."""
        self._take(await families(self._context))

    async def close(self) -> None:
        """Export the last metrics and end the library's thread."""
        with contextlib.suppress(Exception):  # an unreachable collector must not prevent shutdown
            await asyncio.to_thread(self._provider.shutdown, SEND_TIMEOUT_S * 1000)

    def _take(self, found: Iterable[Family]) -> None:
        self._latest = {family.name: family for family in found}
        for family in self._latest.values():
            if family.name in self._known:
                continue
            self._known.add(family.name)
            counter = family.kind == "counter"
            make = (
                self._meter.create_observable_counter
                if counter
                else self._meter.create_observable_gauge
            )
            make(family.name, callbacks=[self._observe(family.name)], description=family.text)

    def _observe(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            family = self._latest.get(name)  # None: e.g. of stages, while no SWARM runs
            samples = family.samples if family is not None else ()
            return [Observation(value, labels) for labels, value in samples if value is not None]

        return observe


def _metrics_url(url: str) -> str:
    """Return the URL to which metrics are posted; ConfigError if `url` is invalid."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ConfigError(
            "this is not the URL of an OpenTelemetry collector",
            given=url,
            expected="e.g. http://127.0.0.1:4318",
        )
    return url if "/" in rest.rstrip("/") else f"{url.rstrip('/')}/v1/metrics"
