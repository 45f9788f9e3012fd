"""A connection to a NATS server with JetStream, with retries for up to `PATIENCE_S`.

Repeated requests are safe because items are recognized by their key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from atoll.errors import ConfigError, HubError

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 30.0
"""How long a request is retried while the server is unavailable."""

ANSWER_S = 5.0
"""Timeout of one request before it is repeated."""

OLDEST_SERVER = (2, 11)


class NatsClient:
    """A self-reconnecting connection; raises ConfigError for an invalid URL.

    `url` is `nats://[USER:PASSWORD@]HOST:PORT[/NAMESPACE]`, or ws:// and wss://; `@FILE` has it in
    a file, so that other users of the machine see no password in a command line. Hubs that share a
    server need different namespaces.
    """

    def __init__(self, url: str) -> None:
        if url.startswith("@"):
            url = _read(Path(url[1:]))
        parts = urlsplit(url)
        if parts.scheme not in ("nats", "tls", "ws", "wss") or not parts.hostname:
            raise ConfigError(
                "this is not the address of a NATS server",
                given=url.rpartition("@")[2],
                expected="nats://HOST:PORT",
            )
        self.namespace = parts.path.strip("/") or "atoll"
        self.shown = f"{parts.scheme}://{parts.hostname}:{parts.port or 4222}"
        self._server = url.removesuffix(parts.path) if parts.path else url
        self.nats: Any = None
        self.jetstream: Any = None

    async def connect(self) -> None:
        """Connect; later disconnects are repaired automatically.

        Raises:
            ConfigError: the package for NATS is not installed, or the server is too old.
            HubError: the server does not answer.
        """
        try:
            import nats
        except ImportError as error:
            raise ConfigError(
                "queues in NATS need a package that is not installed",
                given="nats-py",
                remedy="pip install 'atoll[nats]'",
            ) from error
        try:
            await self._probe()
            self.nats = await asyncio.wait_for(
                nats.connect(
                    self._server,
                    connect_timeout=3,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,
                    ping_interval=10,
                    pending_size=64 * 2**20,
                    error_cb=_log_error,
                ),
                ANSWER_S,
            )
        except (OSError, TimeoutError, nats.errors.Error) as error:
            raise HubError(
                "the queue server does not answer",
                given=f"{self.shown} ({error or type(error).__name__})",
                expected="a NATS server with JetStream",
                remedy="start it (`nats-server -js`), or start the hub without --queue",
            ) from error
        version = self.nats.connected_server_version
        if (version.major, version.minor) < OLDEST_SERVER:
            raise ConfigError(
                "the NATS server is too old",
                given=f"{version.major}.{version.minor} at {self.shown}",
                expected=f"at least {OLDEST_SERVER[0]}.{OLDEST_SERVER[1]}",
            )
        self.jetstream = self.nats.jetstream(timeout=ANSWER_S, publish_async_max_pending=100_000)

    async def _probe(self) -> None:
        """Raise if the port is closed, because the library would retry forever."""
        parts = urlsplit(self._server)
        host, port = parts.hostname, parts.port or 4222
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), ANSWER_S)
        writer.close()

    async def close(self) -> None:
        """Close the connection."""
        if self.nats is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.nats.close(), 2.0)

    async def ask(self, verb: str, body: dict[str, Any], *, absent: int = 0) -> dict[str, Any]:
        """Return the answer of the JetStream API; error code `absent` is not an error."""

        async def work() -> dict[str, Any] | None:
            message = await self.nats.request(
                f"$JS.API.{verb}", json.dumps(body).encode(), timeout=ANSWER_S
            )
            answer: dict[str, Any] = json.loads(message.data)
            error = answer.get("error")
            if error is None or error.get("err_code") == absent:
                return answer
            if error.get("code") == 503:
                return None  # the server has just started
            raise HubError("the queue server refused", given=f"{verb}: {error.get('description')}")

        return await self.patiently(f"{verb.partition('.ATOLL')[0]} was not answered", work)

    async def patiently(self, what: str, work: Callable[[], Awaitable[T | None]]) -> T:
        """Return the result of `work`, retried on failure or None; finally raises HubError."""
        import nats.errors

        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + PATIENCE_S, 0.05
        while True:
            try:
                found = await work()
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.info("nats: %s: %s", what, error or type(error).__name__)
                found = None
            if found is not None:
                return found
            if loop.time() > deadline:
                raise HubError(
                    "the queue server is unavailable",
                    given=f"{self.shown}: {what} within {PATIENCE_S:g} s",
                    remedy="check that it runs; acknowledged items are safe",
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)


async def _log_error(error: Exception) -> None:
    log.info("nats: %s", error or type(error).__name__)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the address of the queue server cannot be read", given=f"{path} ({error})",
            expected="a text file with nats://USER:PASSWORD@HOST:PORT",
        ) from error  # fmt: skip
