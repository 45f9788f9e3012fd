"""How to reach a hub: authority, client certificate, proxy and bandwidth limits; and tickets."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass

from atoll.config import WorkerEnvironment
from atoll.errors import ConfigError
from atoll.net.proxies import at_address


@dataclass(frozen=True, slots=True)
class HubEndpoint:
    """Connection settings for one hub; paths are PEM files."""

    ca: str = ""
    """The hub's certificate authority; empty: the system's authorities."""
    certificate: str = ""
    """Client certificate, for hubs that require one."""
    key: str = ""
    """Private key of that certificate."""
    proxy: str = ""
    """URL of an HTTP or SOCKS proxy; empty: connect directly."""
    upload_bps: float = 0.0
    """Limit in bits per second; 0: none."""
    download_bps: float = 0.0
    """Limit in bits per second; 0: none."""
    verified: bool = True
    """Whether to authenticate the hub; only a pairing, which does that itself, sets False."""
    pace: str = ""
    """File through which the processes of this machine share these limits; empty: limits per
    process."""

    def context(self, *, secure: bool) -> ssl.SSLContext | None:
        """Return the TLS context; None without TLS. Raises ConfigError for an unusable file.

        With a pinned authority the host name is not checked: that authority signs the servers of
        one hub only, and a hub has many addresses.
        """
        if not secure:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = self.verified and not self.ca
            if not self.verified:
                context.verify_mode = ssl.CERT_NONE
            if self.ca:  # a pinned certificate need not be self-signed
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
"""Endpoint of a hub without TLS or proxy."""


def endpoint_of(worker: WorkerEnvironment) -> HubEndpoint:
    """Return the endpoint that the node's agent passed to a worker."""
    return HubEndpoint(
        ca=worker.ca,
        proxy=worker.proxy,
        upload_bps=worker.upload_bps,
        download_bps=worker.download_bps,
        pace=worker.pace,
    )


FORM = "atoll://HOST:PORT/SECRET~FINGERPRINT"

OPEN = "tls"
"""Mark of a ticket for a hub with a certificate of a public authority."""

_TICKET = re.compile(
    r"atoll://(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s:/\[\]@?#]+)):(?P<port>\d{1,5})"
    r"(?P<prefix>(?:/[A-Za-z0-9_.-]+)*)"
    r"/(?P<secret>[A-Za-z0-9_-]+)(?:~(?P<mark>[0-9a-f]{40}|tls))?/?"
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Address of a hub, the secret that authorizes joining, and how to authenticate the hub."""

    host: str
    port: int
    secret: str
    prefix: str = ""
    """Path of the hub, e.g. `/atoll`; empty or without a trailing slash."""
    mark: str = ""
    """Fingerprint of the hub's authority, or `tls`; empty: no TLS."""

    @property
    def secure(self) -> bool:
        """Whether the hub uses TLS."""
        return bool(self.mark)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the hub's own authority; empty: none is pinned."""
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
    """Parse a ticket; surrounding whitespace is ignored.

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
    front, slash, end = text.strip()[:200].rpartition("/")
    return f"{front}{slash}{end[:4]}..." if len(end) > 8 else text.strip()[:200]
