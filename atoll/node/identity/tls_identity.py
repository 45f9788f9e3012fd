"""Mutual trust of machine and hub: a pinned authority, and the machine's own key."""

from __future__ import annotations

import hashlib
import hmac
import ssl
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from atoll.errors import AuthError, ConfigError
from atoll.ids import safe_name
from atoll.net import pinned
from atoll.net.endpoint import Ticket
from atoll.net.proxies import unreachable
from atoll.node.identity.identity import write_secret

FOLDER = "tls"

MAX_CA_BYTES = 64 * 1024
RENEW_AT = 0.9
"""Remaining share of a certificate's life at which it is renewed: early, because a machine that is
off for longer than what is left has to join again."""


def pin(ticket: Ticket, *, home: Path, proxy: str = "", timeout_s: float = 20.0) -> str:
    """Fetch the authority of a ticket's hub, verify its fingerprint, and store it.

    The connection itself is unauthenticated; only the fingerprint counts. Returns the path of the
    PEM file, or an empty text if the ticket names no authority.

    Raises:
        HubUnreachable: no hub answers.
        AuthError: another hub answers, or a man in the middle.
    """
    if not ticket.fingerprint:
        return ""
    path = folder_of(ticket.url, home=home) / f"ca-{ticket.fingerprint[:16]}.pem"
    if ticket.fingerprint in pinned.fingerprints(path):
        return str(path)
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    unverified.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        with (
            httpx.Client(
                verify=unverified, proxy=proxy or None, trust_env=False, timeout=timeout_s
            ) as client,
            client.stream("GET", f"{ticket.url}/ca.pem") as response,
        ):
            text = _read(response) if response.is_success else ""
    except httpx.TimeoutException as error:
        raise unreachable(ticket.url, TimeoutError()) from error
    except httpx.TransportError as error:
        raise unreachable(ticket.url, error) from error
    try:
        der = ssl.PEM_cert_to_DER_cert(text.strip())
    except ValueError:
        der = b""
    found = pinned.fingerprint_of(der)
    if not hmac.compare_digest(found, ticket.fingerprint):
        raise AuthError(
            "the server at this address is not the hub of this ticket",
            given=f"an authority with fingerprint {found}" if der else "no certificate authority",
            expected=ticket.fingerprint,
            remedy="ask for a fresh ticket; if this repeats, the connection may be intercepted",
        )
    write_secret(path, ssl.DER_cert_to_PEM_cert(der))  # only the verified certificate
    return str(path)


def _read(response: httpx.Response) -> str:
    content = b""
    for block in response.iter_bytes():
        content += block
        if len(content) > MAX_CA_BYTES:
            return ""
    return content.decode("ascii", "replace")


def folder_of(hub: str, *, home: Path) -> Path:
    """Return the folder of keys and certificates for a hub."""
    parts = urlsplit(hub)
    digest = hashlib.sha256(hub.encode()).hexdigest()[:8]
    return home / FOLDER / f"{safe_name(parts.netloc)}-{digest}"


def make_key(path: Path) -> None:
    """Create a private key, readable by its owner only."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    write_secret(path, pem.decode())


def signing_request(path: Path) -> str:
    """Return the PEM signing request for a key; raises ConfigError if it cannot be read."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise _broken(path, error) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _broken(path, ValueError("it is not a P-256 key"))
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    signed = request.sign(key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def life_left(path: str) -> tuple[float, float]:
    """Return the seconds for which a certificate is still valid, and their share of its life.

    Both are 0 for a file that is not a certificate.
    """
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(Path(path).read_bytes())
    except (OSError, ValueError):
        return 0.0, 0.0
    begins, ends = found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    left = ends - time.time()
    return left, left / max(ends - begins, 1.0)


def is_of(certificate: str, *, ca: str) -> bool:
    """Return whether a certificate was signed by the newest authority that is pinned."""
    from cryptography import x509

    try:
        mine = x509.load_pem_x509_certificate(Path(certificate).read_bytes())
        authorities = x509.load_pem_x509_certificates(Path(ca).read_bytes())
    except (OSError, ValueError):
        return True
    return mine.issuer == authorities[-1].subject


def _broken(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        "the key of this machine cannot be used",
        given=f"{path} ({error})",
        remedy="join again with a fresh ticket",
    )
