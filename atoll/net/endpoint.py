"""How a hub is reached besides its address: whom to trust, as whom, and through which proxy.

Tickets: what one machine prints and the others are started with.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass

from atoll.config import WorkerEnvironment
from atoll.errors import ConfigError
from atoll.net.proxies import at_address


@dataclass(frozen=True, slots=True)
class HubEndpoint:
    """The way to one hub. Paths are of PEM files; everything empty: a hub that needs nothing."""

    ca: str = ""
    """The hub's own certificate authority; empty: those that this machine trusts."""
    certificate: str = ""
    """The own certificate, for hubs that ask for one."""
    key: str = ""
    """The key of that certificate."""
    proxy: str = ""
    """URL of an HTTP or SOCKS proxy; empty: dial directly."""
    upload_bps: float = 0.0
    """Bits per second that may be sent on this way; 0: no limit."""
    download_bps: float = 0.0
    """Bits per second that may be received on it; 0: no limit."""
    pace: str = ""
    """File by which all processes of this machine keep to these limits together; empty: each
    process counts alone."""

    def context(self, *, secure: bool) -> ssl.SSLContext | None:
        """Return what TLS connections are made with; None for a plain one.

        With a pinned authority the name in the hub's certificate is not compared: the authority
        signs servers for one hub only, and a hub has many addresses.

        Raises:
            ConfigError: a file is missing or is no certificate.
        """
        if not secure:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = not self.ca
            if self.ca:  # what is pinned may be the hub's own certificate, or one in between
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                "the certificates for this hub cannot be read",
                given=f"{self.ca} {self.certificate} ({error})",
                remedy="join again with a fresh ticket",
            ) from error
        return context


PLAIN = HubEndpoint()
"""The way to a hub on this machine."""


def endpoint_of(worker: WorkerEnvironment) -> HubEndpoint:
    """Return the way to the hub that the node agent told a worker; its token proves who it is."""
    return HubEndpoint(
        ca=worker.ca,
        proxy=worker.proxy,
        upload_bps=worker.upload_bps,
        download_bps=worker.download_bps,
        pace=worker.pace,
    )


FORM = "atoll://HOST:PORT/SECRET~FINGERPRINT"

OPEN = "tls"
"""In place of a fingerprint: the hub's certificate is of an authority that this machine trusts."""

_TICKET = re.compile(
    r"atoll://(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s:/\[\]@?#]+)):(?P<port>\d{1,5})"
    r"(?P<prefix>(?:/[A-Za-z0-9_.-]+)*)"
    r"/(?P<secret>[A-Za-z0-9_-]+)(?:~(?P<mark>[0-9a-f]{40}|tls))?/?"
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a hub is, the secret that lets a machine or a person in, and how to know the hub."""

    host: str
    port: int
    secret: str
    prefix: str = ""
    """Path below which the hub is, e.g. `/atoll`; empty or without a slash at its end."""
    mark: str = ""
    """Fingerprint of the hub's authority, or `tls`; empty: the hub speaks plain HTTP."""

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken there."""
        return bool(self.mark)

    @property
    def fingerprint(self) -> str:
        """Of the hub's own authority; empty: there is none to compare with."""
        return "" if self.mark == OPEN else self.mark

    @property
    def url(self) -> str:
        """The hub's URL, http(s)://HOST:PORT[/PREFIX]."""
        scheme = "https" if self.secure else "http"
        return f"{scheme}://{at_address(self.host, self.port)}{self.prefix}"

    def __str__(self) -> str:
        mark = f"~{self.mark}" if self.mark else ""
        return f"atoll://{at_address(self.host, self.port)}{self.prefix}/{self.secret}{mark}"


def parse_ticket(text: str) -> Ticket:
    """Return the ticket that a person pasted; blanks around it do not matter.

    Raises:
        ConfigError: it is not of the form atoll://HOST:PORT[/PREFIX]/SECRET[~FINGERPRINT].
    """
    match = _TICKET.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ConfigError(
            "this is not a ticket",
            given=repr(_without_secret(text)),
            expected=FORM,
            remedy="copy the whole line that `atoll hub` or `atoll ticket new` prints",
        )
    return Ticket(
        match["six"] or match["host"],
        int(match["port"]),
        match["secret"],
        prefix=match["prefix"],
        mark=match["mark"] or "",
    )


def _without_secret(text: str) -> str:
    """Return what a person gave, for an error message, without what may be a secret."""
    front, slash, end = text.strip()[:200].rpartition("/")
    return f"{front}{slash}{end[:4]}..." if len(end) > 8 else text.strip()[:200]
