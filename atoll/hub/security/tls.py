"""TLS of the hub: off on loopback, otherwise with its own authority or given certificates."""

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
"""Interval of the checks whether the hub's certificate needs renewal."""

OPEN_MARK = "tls"
"""Ticket mark: the hub's certificate was signed by a publicly trusted authority."""


@dataclass(frozen=True, slots=True)
class TlsChoice:
    """The parsed value of `--tls`."""

    mode: Literal["off", "own", "given"]
    certificate: Path = Path()
    key: Path = Path()

    @property
    def scheme(self) -> str:
        """Scheme of the hub's URL."""
        return "http" if self.mode == "off" else "https"


def choose(wish: str, *, host: str) -> TlsChoice:
    """Return the TLS mode of a hub that listens on `host`; raises ConfigError.

    `wish` is `auto` (TLS unless on loopback), `on`, `off`, or `CERTIFICATE:KEY`, two PEM files.
    """
    if wish in ("auto", ""):
        return TlsChoice("off" if is_loopback(host) else "own")
    if wish in ("on", "off"):
        return TlsChoice("own" if wish == "on" else "off")
    certificate, colon, key = wish.rpartition(":")
    if not colon:
        raise ConfigError(
            "the option --tls is not valid",
            given=f"--tls {wish}",
            expected="auto, on, off, or CERTIFICATE:KEY (two PEM files)",
        )
    for path in (Path(certificate), Path(key)):
        if not path.is_file():
            raise ConfigError("a file of --tls is missing", given=str(path), expected="a PEM file")
    return TlsChoice("given", Path(certificate).resolve(), Path(key).resolve())


class TlsFiles:
    """Certificates and SSL context of a running hub."""

    def __init__(
        self, choice: TlsChoice, *, data: Path, names: tuple[str, ...], clock: Clock
    ) -> None:
        """Open or create the authority; issue the hub's certificate for `names` if needed.

        Raises:
            ConfigError: the given certificate or key cannot be used.
            HubError: the authority is damaged.
        """
        self._choice = choice
        self._names = names
        self.authority = Authority(data / FOLDER, clock=clock)
        own = choice.mode == "own"
        self.ca = self.authority.ca if own else choice.certificate
        """Certificate file that processes on this machine trust."""
        self.fingerprint = self.authority.fingerprint if own else ""
        """Fingerprint of the hub's own authority; empty: the certificate was given."""
        self.mark = self.authority.fingerprint if own else OPEN_MARK
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # clients of a hub do not resume TLS sessions
        self.context.load_verify_locations(self.authority.ca)
        # only nodes have certificates; people and workers authenticate by token
        self.context.verify_mode = ssl.CERT_OPTIONAL
        self.refresh(first=True)

    def refresh(self, *, first: bool = False) -> None:
        """Renew the hub's certificate if needed; new connections use the new one."""
        if self._choice.mode == "own":
            renewed = self.authority.refresh(own_names(*self._names))
            if renewed or first:
                self.context.load_cert_chain(self.authority.certificate)
            return
        try:  # given files are renewed in place by an external tool
            self.context.load_cert_chain(self._choice.certificate, self._choice.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                "the certificate of --tls cannot be used",
                given=f"{self._choice.certificate} ({error})",
                expected="a PEM certificate with its chain, and its key without a password",
            ) from error

    async def keep(self, *, every_s: float = LOOK_S) -> None:
        """Check for renewal every `every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await asyncio.to_thread(self.refresh)
            except (AtollError, OSError) as error:
                logger.error("the hub's certificate was not renewed: %s", error)
