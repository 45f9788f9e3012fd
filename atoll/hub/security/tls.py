"""Whether a hub speaks TLS, and with what: off on loopback, else with an authority of its own."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.clock import Clock
from atoll.errors import AtollError, ConfigError
from atoll.hub.security.certificates import FOLDER, Authority, own_names
from atoll.hub.security.connection_limits import is_loopback

logger = logging.getLogger(__name__)

LOOK_S = 3_600.0
"""Pause between two looks at the hub's own certificate."""

OPEN_MARK = "tls"
"""In a ticket: the hub's certificate is of an authority that every machine trusts."""


@dataclass(frozen=True, slots=True)
class TlsChoice:
    """What `--tls` comes to."""

    mode: Literal["off", "own", "given"]
    certificate: Path = Path()
    key: Path = Path()

    @property
    def scheme(self) -> str:
        """Of the hub's URL."""
        return "http" if self.mode == "off" else "https"


def choose(wish: str, *, host: str) -> TlsChoice:
    """Return how a hub bound to `host` speaks.

    Args:
        wish: `auto` (TLS unless on loopback), `on`, `off`, or `CERTIFICATE:KEY`, two PEM files.
        host: Address that it listens on.

    Raises:
        ConfigError: the wish is none of these, or a file is missing.
    """
    if wish in ("auto", ""):
        return TlsChoice("off" if is_loopback(host) else "own")
    if wish in ("on", "off"):
        return TlsChoice("own" if wish == "on" else "off")
    certificate, colon, key = wish.rpartition(":")
    if not colon:
        raise ConfigError(
            "this is no way to speak TLS",
            given=f"--tls {wish}",
            expected="auto, on, off, or CERTIFICATE:KEY (two PEM files)",
        )
    for path in (Path(certificate), Path(key)):
        if not path.is_file():
            raise ConfigError("a file of --tls is missing", given=str(path), expected="a PEM file")
    return TlsChoice("given", Path(certificate).resolve(), Path(key).resolve())


class TlsFiles:
    """The certificates of a running hub."""

    def __init__(
        self, choice: TlsChoice, *, data: Path, names: tuple[str, ...], clock: Clock
    ) -> None:
        """Open the authority, or make it; make the hub's own certificate if it needs one.

        Args:
            choice: How the hub speaks; not `off`.
            data: The hub's data folder.
            names: Further names of the hub, e.g. the one in its tickets.
            clock: Tells when certificates end.

        Raises:
            ConfigError: the given certificate or its key cannot be used.
            HubError: the authority is damaged.
        """
        self._choice = choice
        self._names = names
        self.authority = Authority(data / FOLDER, clock=clock)
        own = choice.mode == "own"
        self.ca = self.authority.ca if own else choice.certificate
        """What processes on this machine trust."""
        self.fingerprint = self.authority.fingerprint if own else ""
        """Of the authority that signed the hub's own certificate; empty: one that is well known."""
        self.mark = self.authority.fingerprint if own else OPEN_MARK
        """What tickets say of it."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # no client of a hub takes a session up again
        self.context.load_verify_locations(self.authority.ca)
        self.context.verify_mode = ssl.CERT_OPTIONAL  # people and workers have tokens only
        self.refresh(first=True)

    def refresh(self, *, first: bool = False) -> None:
        """Renew the hub's own certificate if it is time; new connections get the new one."""
        if self._choice.mode == "own":
            renewed = self.authority.refresh(own_names(*self._names))
            if renewed or first:
                self.context.load_cert_chain(self.authority.certificate)
            return
        try:  # whoever renews it replaces the files
            self.context.load_cert_chain(self._choice.certificate, self._choice.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                "the certificate of --tls cannot be used",
                given=f"{self._choice.certificate} ({error})",
                expected="a PEM certificate with its chain, and its key without a password",
            ) from error

    async def keep(self, *, every_s: float = LOOK_S) -> None:
        """Renew the hub's own certificate whenever it is time, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await asyncio.to_thread(self.refresh)
            except (AtollError, OSError) as error:
                logger.error("the hub's certificate was not renewed: %s", error)
