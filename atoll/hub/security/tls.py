"""TLS of the hub: off on loopback, otherwise with its own authority or given certificates."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.clock import Clock
from atoll.errors import AtollError, ConfigError, HubError
from atoll.hub.security.certificates import (
    CA,
    CA_KEY,
    FOLDER,
    NEXT,
    OWN,
    SWITCH,
    Authority,
    ends_of,
    own_names,
    write_secret,
)
from atoll.hub.security.connection_limits import is_loopback

logger = logging.getLogger(__name__)

LOOK_S = 3_600.0
"""Interval of the checks whether the hub's certificate needs renewal."""

SWITCH_LOOK_S = 5.0
"""Interval of the checks whether it is time for the next authority."""

TRUSTED = "trusted.pem"
"""File with the present authority and the next one, for processes on this machine."""

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


def choose(option: str, *, host: str) -> TlsChoice:
    """Return the TLS mode of a hub that listens on `host`; raises ConfigError.

    `option` is `auto` (TLS unless on loopback), `on`, `off`, or `CERTIFICATE:KEY`, two PEM files.
    """
    if option in ("auto", ""):
        return TlsChoice("off" if is_loopback(host) else "own")
    if option in ("on", "off"):
        return TlsChoice("own" if option == "on" else "off")
    certificate, colon, key = option.rpartition(":")
    if not colon:
        raise ConfigError(
            "the option --tls is not valid",
            given=f"--tls {option}",
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
        self._clock = clock
        self._folder = data / FOLDER
        _finish_switch(self._folder)
        self.authority = Authority(self._folder, clock=clock)
        self.next: Authority | None = None
        """The authority that will replace the present one; it already signs nodes' certificates."""
        self.switch_at = 0.0
        """Time of that replacement, seconds since 1970."""
        self.on_switch: Callable[[], None] = lambda: None
        if (self._folder / SWITCH).exists():
            self.next = Authority(self._folder, clock=clock, front=NEXT)
            self.switch_at = float((self._folder / SWITCH).read_text(encoding="ascii"))
        self.context = self._open()
        self.refresh()

    @property
    def _own(self) -> bool:
        return self._choice.mode == "own"

    @property
    def ca(self) -> Path:
        """Certificate file that processes on this machine trust."""
        return self._folder / TRUSTED if self._own else self._choice.certificate

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the hub's own authority; empty: the certificate was given."""
        return self.authority.fingerprint if self._own else ""

    @property
    def mark(self) -> str:
        """What a ticket says about the hub's certificate."""
        return self.fingerprint or OPEN_MARK

    @property
    def authorities(self) -> list[Authority]:
        """The authorities that nodes may have certificates of, the present one first."""
        return [self.authority, *([self.next] if self.next is not None else [])]

    @property
    def named(self) -> str:
        """Fingerprints by which clients will know this hub; empty: the certificate was given."""
        return ",".join(one.fingerprint for one in self.authorities) if self._own else ""

    def _open(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # clients of a hub do not resume TLS sessions
        for authority in self.authorities:
            context.load_verify_locations(authority.ca)
        # only nodes have certificates; people and workers authenticate by token
        context.verify_mode = ssl.CERT_OPTIONAL
        if self._own:
            trusted = b"".join(one.ca.read_bytes() for one in self.authorities)
            write_secret(self._folder / TRUSTED, trusted, mode=0o644)
            self.authority.refresh(own_names(*self._names))
            context.load_cert_chain(self.authority.certificate)
            return context
        try:  # given files are renewed in place by an external tool
            context.load_cert_chain(self._choice.certificate, self._choice.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                "the certificate of --tls cannot be used",
                given=f"{self._choice.certificate} ({error})",
                expected="a PEM certificate with its chain, and its key without a password",
            ) from error
        return context

    def refresh(self) -> None:
        """Renew the hub's certificate if needed, change the authority when it is time.

        Only new connections use the new ones.
        """
        if self.next is not None and self._clock.wall() >= self.switch_at:
            self._switch()
        self.context = self._open()

    def renew_certificate(self) -> float:
        """Give the hub another key and certificate; return when that expires.

        Raises HubError if the certificate was given.
        """
        self._check_own()
        self.authority.refresh(own_names(*self._names), anew=True)
        self.context = self._open()
        return ends_of(self.authority.certificate)

    def rotate_authority(self, *, overlap_s: float) -> float:
        """Make another authority, which replaces the present one after `overlap_s`; return when.

        Until then clients that connect pin it too, and it signs nodes' certificates. With 0 the
        change is immediate, and all have to join and log in again. Raises HubError if the
        certificate was given.
        """
        self._check_own()
        for name in (SWITCH, NEXT + CA, NEXT + CA_KEY, NEXT + OWN):
            (self._folder / name).unlink(missing_ok=True)
        self.next = Authority(self._folder, clock=self._clock, front=NEXT)
        self.switch_at = self._clock.wall() + overlap_s
        write_secret(self._folder / SWITCH, repr(self.switch_at).encode())
        self.refresh()
        return self.switch_at

    def _check_own(self) -> None:
        if not self._own:
            raise HubError(
                "this hub's certificate was given with --tls",
                remedy="renew it where it comes from: the hub reads the files again every hour",
            )

    def _switch(self) -> None:
        """Put the next authority in the place of the present one; a restart resumes it."""
        assert self.next is not None
        self.next.ca_key.replace(self.authority.ca_key)
        _finish_switch(self._folder)
        self.authority, self.next = Authority(self._folder, clock=self._clock), None
        logger.warning("the authority of this hub is now %s", self.authority.fingerprint)
        self.on_switch()

    async def keep(self, *, every_s: float = LOOK_S) -> None:
        """Check for renewal every `every_s` seconds, until cancelled."""
        looked = self._clock.monotonic()
        while True:
            await asyncio.sleep(min(every_s, SWITCH_LOOK_S))
            due = self.next is not None and self._clock.wall() >= self.switch_at
            if not due and self._clock.monotonic() - looked < every_s:
                continue
            looked = self._clock.monotonic()
            try:
                await asyncio.to_thread(self.refresh)
            except (AtollError, OSError) as error:
                logger.error("the hub's certificate was not renewed: %s", error)


def _finish_switch(folder: Path) -> None:
    """Finish a change of authorities after its key was replaced, also after a crash."""
    if (folder / f"{NEXT}{CA_KEY}").exists():
        return
    if (folder / f"{NEXT}{CA}").exists():
        (folder / f"{NEXT}{CA}").replace(folder / CA)
        (folder / OWN).unlink(missing_ok=True)
    (folder / SWITCH).unlink(missing_ok=True)
