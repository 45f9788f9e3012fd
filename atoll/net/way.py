"""How a hub is reached besides its address: whom to trust, as whom, and through which proxy."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from atoll.config import WorkerEnvironment
from atoll.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Way:
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


PLAIN = Way()
"""The way to a hub on this machine."""


def way_of(worker: WorkerEnvironment) -> Way:
    """Return the way to the hub that the node agent told a worker; its token proves who it is."""
    return Way(
        ca=worker.ca,
        proxy=worker.proxy,
        upload_bps=worker.upload_bps,
        download_bps=worker.download_bps,
        pace=worker.pace,
    )
