"""The hub's certificate authority (P-256), and secret files that only their owner can read.

Server and node certificates differ in their extended key usage, so that a node cannot impersonate
the hub. `cryptography` is imported lazily: a hub on loopback never loads it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.clock import Clock
from atoll.errors import ConfigError, HubError
from atoll.ids import new_suffix

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, CertificateBuilder, CertificateSigningRequest


def make_secret_folder(folder: Path) -> None:
    """Create a folder with mode 0700, or restrict an existing one to it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(OSError):  # owned by another user, e.g. the volume of a container
        folder.chmod(0o700)


def write_secret(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file atomically; it has these permissions from the first byte."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{new_suffix()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


FOLDER = "tls"

CA, CA_KEY, OWN = "ca.pem", "ca.key", "hub.pem"
NEXT = "next-"
"""Prefix of the files of the authority that is to replace the present one."""

SWITCH = "switch"
"""File with the time of that replacement, in seconds since 1970."""

FILES = (CA, CA_KEY, OWN, NEXT + CA, NEXT + CA_KEY, SWITCH)

AUTHORITY_DAYS = 3_650
SERVER_DAYS = 365
NODE_DAYS = 30
"""Validity of certificates. A node renews its own every few days, see
:data:`atoll.node.identity.tls_identity.RENEW_AT`, and can be off for at most this long."""

FINGERPRINT_DIGITS = 40
"""Hexadecimal digits of the authority's SHA-256 in a ticket: 160 bits."""

MAX_REQUEST_BYTES = 4_096
"""Longest accepted signing request; one for P-256 has about 500 bytes."""

_CLOCKS_APART = datetime.timedelta(hours=24)
"""Certificates are backdated by this, because clocks of laptops are often wrong."""


@dataclass(frozen=True, slots=True)
class SignedCertificate:
    """The certificate of a node."""

    pem: str
    serial: str
    expires: float
    """Seconds since 1970."""


class Authority:
    """The certificate authority of one hub. Missing files are created when it is opened."""

    def __init__(self, folder: Path, *, clock: Clock, front: str = "") -> None:
        """Load or create the authority; raises HubError if its files are damaged.

        `front` is the prefix of its file names.
        """
        self._clock = clock
        self.ca = folder / f"{front}{CA}"
        self.certificate = folder / f"{front}{OWN}"
        """The hub's certificate and key in one file, so that both change together."""
        self.ca_key = folder / f"{front}{CA_KEY}"
        self._ensure()
        self.fingerprint = fingerprint_of(self._load().public_bytes(_der()))

    def _ensure(self) -> None:
        if self.ca.exists() and self.ca_key.exists():
            return
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"Atoll hub {secrets.token_hex(4)}")
        builder = (
            self._builder(name, key.public_key(), days=AUTHORITY_DAYS)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
        )
        from cryptography.hazmat.primitives import hashes

        certificate = builder.sign(key, hashes.SHA256())
        write_secret(self.ca_key, _key_pem(key))
        write_secret(self.ca, certificate.public_bytes(_pem()), mode=0o644)

    # --------------------------------------------------------------- certificate of the hub

    def refresh(self, names: Sequence[str], *, anew: bool = False) -> bool:
        """Renew the hub's certificate if it is missing, expires soon or has other names.

        With `anew` it is renewed in any case. Returns whether it was renewed.
        """
        if not anew and self._still_good(names):
            return False
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name("Atoll hub"), key.public_key(), days=SERVER_DAYS)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
        )
        signed = self._sign(builder, key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH)
        write_secret(self.certificate, _key_pem(key) + signed.public_bytes(_pem()))
        return True

    def _still_good(self, names: Sequence[str]) -> bool:
        from cryptography import x509

        try:
            known = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        except (OSError, ValueError):
            return False
        begins, ends = known.not_valid_before_utc, known.not_valid_after_utc
        if self._now() > ends - (ends - begins) / 3:
            return False
        found = known.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if {_general_name(name) for name in names} != set(found):
            return False
        with contextlib.suppress(Exception):
            known.verify_directly_issued_by(self._load())
            return True
        return False

    # ---------------------------------------------------------------- certificates of nodes

    def sign_node(self, request_pem: str, *, node: str) -> SignedCertificate:
        """Return a certificate for the key of a request; raises ConfigError if it is not P-256."""
        from cryptography.x509.oid import ExtendedKeyUsageOID

        public_key = _key_of(request_pem)
        builder = self._builder(_name(node), public_key, days=NODE_DAYS)
        signed = self._sign(builder, public_key, ExtendedKeyUsageOID.CLIENT_AUTH)
        return SignedCertificate(
            pem=signed.public_bytes(_pem()).decode(),
            serial=serial_text(signed.serial_number),
            expires=signed.not_valid_after_utc.timestamp(),
        )

    # ------------------------------------------------------------------------------ signing

    def _builder(self, name: Any, public_key: Any, *, days: int) -> CertificateBuilder:
        from cryptography import x509

        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now() - _CLOCKS_APART)
            .not_valid_after(self._now() + datetime.timedelta(days=days))
        )

    def _sign(self, builder: CertificateBuilder, public_key: Any, purpose: Any) -> Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        ca = self._load()
        try:
            ca_key: Any = serialization.load_pem_private_key(self.ca_key.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise _damaged(self.ca_key, error) from error
        identifier = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return (
            builder.issuer_name(ca.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
                critical=False,
            )
            .sign(ca_key, hashes.SHA256())
        )

    def _load(self) -> Certificate:
        from cryptography import x509

        try:
            return x509.load_pem_x509_certificate(self.ca.read_bytes())
        except (OSError, ValueError) as error:
            raise _damaged(self.ca, error) from error

    def _now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(int(self._clock.wall()), datetime.UTC)


def serial_text(number: int) -> str:
    """Return a serial number in hexadecimal without leading zeros."""
    return f"{number:X}"


def ends_of(certificate: Path) -> float:
    """Return when the first certificate of a file expires, in seconds since 1970."""
    from cryptography import x509

    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc.timestamp()


def fingerprint_of(der: bytes) -> str:
    """Return the shortened SHA-256 of a certificate that tickets contain."""
    return hashlib.sha256(der).hexdigest()[:FINGERPRINT_DIGITS]


def own_names(*more: str) -> list[str]:
    """Return every name and address of this machine, and `more`, for the hub's certificate."""
    import psutil  # only a hub with TLS needs it

    found = {"localhost", "127.0.0.1", "::1", socket.gethostname(), *more}
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                found.add(address.address.partition("%")[0])
    return sorted(name for name in found if _is_name(name))


def _is_name(name: str) -> bool:
    return bool(name) and name.isascii() and len(name) <= 253 and name not in ("0.0.0.0", "::")


def _general_name(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_of(request_pem: str) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    wrong = ConfigError(
        "the signing request of this node is wrong",
        expected="a PEM signing request for a key of the curve P-256",
        remedy="join again: `atoll join` makes one",
    )
    if len(request_pem) > MAX_REQUEST_BYTES:
        raise wrong
    try:
        request: CertificateSigningRequest = x509.load_pem_x509_csr(request_pem.encode())
        key = request.public_key()
        right = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
        right = right and request.is_signature_valid
    except Exception as error:  # the parser raises many types of errors on untrusted input
        raise wrong from error
    if not right:
        raise wrong
    return key


def _name(common_name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, signs_certificates: bool) -> Any:
    from cryptography import x509

    names = (
        "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        **dict.fromkeys(names, False),
    )


def _key_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    pem: bytes = key.private_bytes(
        _pem(), serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem


def _pem() -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.PEM


def _der() -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.DER


def _damaged(path: Path, error: Exception) -> HubError:
    return HubError(
        "the hub's certificate authority is damaged",
        given=f"{path} ({error})",
        remedy="restore it from a backup, or delete its folder: every node then has to join again",
    )
