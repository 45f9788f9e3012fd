"""TLS between processes that know one secret, e.g. the members of a job, with no other setup.

From the secret each side derives the key of an authority (Ed25519). It signs a certificate of its
own, and accepts those of this authority only: TLS 1.3, both sides with a certificate, so that a
process without the secret can neither listen, connect, read, change nor replay. A certificate names
its process. Every process with the secret can sign any name: a line therefore reports the
fingerprint of the other side's own key, to be compared with the one that the hub knows.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import select
import socket
import ssl
import struct
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

from atoll.errors import AuthError, WireError
from atoll.wire.frames import Buffer

PIECE_BYTES = 1 << 18
"""Bytes that are encrypted and sent together; a socket's time-out holds for each of them."""
HANDSHAKE_S = 5.0
"""Time limit of a handshake."""

_LENGTH = struct.Struct("!I")
_EVER = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
"""No expiry: a certificate lives as long as its process, and clocks of machines may differ."""
_AUTHORITY = "atoll members"


class MemberKey:
    """The key pair of one process."""

    def __init__(self) -> None:
        """Generate a new one; it is on the disk only while `ssl` loads it."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self.private = Ed25519PrivateKey.generate()
        self.fingerprint = _fingerprint(self.private.public_key())
        """SHA-256 of the public key, hexadecimal."""


class MemberTls:
    """Makes encrypted lines to processes that know the same secret."""

    def __init__(self, secret: bytes, *, name: str, key: MemberKey | None = None) -> None:
        """Make certificates for the process `name`.

        Raises:
            AuthError: the secret is empty.
        """
        if not secret:
            raise AuthError("there is no secret to authenticate with", given=name)
        self._own = key or MemberKey()
        self._accepts, self._dials = _contexts(secret, name, self._own)

    @property
    def fingerprint(self) -> str:
        """Of the own key."""
        return self._own.fingerprint

    def listening(self, line: socket.socket) -> SecureLine:
        """Return the encrypted line of a process that has connected; see :meth:`dialling`."""
        return self._open(line, self._accepts, dials=False)

    def dialling(self, line: socket.socket, *, to: str = "") -> SecureLine:
        """Return the encrypted line to the process to which this one has connected.

        Raises:
            AuthError: it does not know the secret, or is not the expected one.
            OSError: it does not answer, or not within :data:`HANDSHAKE_S`.
        """
        found = self._open(line, self._dials, dials=True)
        if to and found.peer != to:
            raise AuthError("another process answers there", given=found.peer, expected=to)
        return found

    def _open(self, line: socket.socket, context: ssl.SSLContext, *, dials: bool) -> SecureLine:
        before = line.gettimeout()
        try:
            found = SecureLine(line, context, dials=dials)
        except ssl.SSLError as error:
            raise AuthError(
                "the other side of a direct connection does not know the secret",
                given=str(error.reason or error), expected="a member of the same job",
            ) from error  # fmt: skip
        line.settimeout(before)
        return found


class SecureLine:
    """One side of an encrypted connection. One thread may send while another one receives."""

    def __init__(self, line: socket.socket, context: ssl.SSLContext, *, dials: bool) -> None:
        """Do the handshake on a connected socket, which the caller closes.

        Raises:
            ssl.SSLError: the other side is not acceptable.
            OSError: it does not answer in time, or the connection ended.
        """
        self._line = line
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not dials)
        # OpenSSL allows one thread at a time; sockets are read and written outside the lock.
        self._lock = threading.Lock()
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        self._handshake()
        self.peer, self.fingerprint = _named(self._tls.getpeercert(binary_form=True))

    def _handshake(self) -> None:
        deadline = time.monotonic() + HANDSHAKE_S
        while True:
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._more()
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # so that the other side learns why
                raise
            else:
                return self._flush()

    def _flush(self) -> None:
        if data := self._outgoing.read():
            self._line.sendall(data)

    def _more(self) -> None:
        """Read from the socket once."""
        nbytes = self._line.recv_into(self._buffer)
        if not nbytes:
            raise ConnectionResetError("the other side closed the connection")
        with self._lock:
            self._incoming.write(self._buffer[:nbytes])

    def write(self, *parts: Buffer) -> None:
        """Send bytes; raises OSError, also if a piece of them takes longer than the time-out."""
        data = b""
        for part in parts:
            view = memoryview(part).cast("B")
            for at in range(0, len(view), PIECE_BYTES):
                with self._lock:
                    self._tls.write(view[at : at + PIECE_BYTES])
                    if self._outgoing.pending >= PIECE_BYTES:
                        data = self._outgoing.read()
                if data:  # a short part goes with the next one
                    self._line.sendall(data)
                    data = b""
        with self._lock:
            data = self._outgoing.read()
        if data:
            self._line.sendall(data)

    def read_into(self, target: memoryview) -> None:
        """Fill `target`, contiguous bytes; raises OSError, also if a byte was changed."""
        done, size = 0, len(target)
        tls: Any = self._tls  # the stubs of `read` know no buffer
        while done < size:
            with self._lock:
                try:
                    while done < size:
                        nbytes = tls.read(size - done, target[done:])
                        if not nbytes:
                            raise ConnectionResetError("the other side closed the connection")
                        done += nbytes
                    return
                except ssl.SSLWantReadError:
                    pass
            self._more()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; return whether data has arrived."""
        with self._lock:
            if self._tls.pending() or self._incoming.pending:
                return True
        return readable(self._line, timeout_s)

    def send(self, body: bytes) -> None:
        """Send one message; raises OSError."""
        start = _LENGTH.pack(len(body))
        if len(body) <= PIECE_BYTES:
            self.write(start + body)
        else:
            self.write(start, body)

    def receive(self, *, most: int) -> bytes:
        """Return one message.

        Raises:
            OSError: the connection ended, or a byte was changed on the way.
            WireError: it is longer than `most` bytes.
        """
        head = bytearray(_LENGTH.size)
        self.read_into(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > most:
            raise WireError("a message is too long", given=f"{length} bytes", expected=f"<= {most}")
        body = bytearray(length)
        self.read_into(memoryview(body))
        return bytes(body)


def readable(line: socket.socket, timeout_s: float) -> bool:
    """Wait up to `timeout_s`; return whether a socket can be read. ValueError: it is closed."""
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select([line], [], [], timeout_s)[0])
    poll = select.poll()  # unlike select(2), for any number of open files
    poll.register(line, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def server_context(key: MemberKey) -> ssl.SSLContext:
    """Return the context of a server that clients recognize by the fingerprint of its key."""
    name = "atoll member"
    own = _certificate(name, key.private.public_key(), name, key.private, authority=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    return _loaded(context, own, key)


def client_context() -> ssl.SSLContext:
    """Return the context of a client that compares the fingerprint; see :func:`check_server`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_server(line: ssl.SSLSocket, fingerprint: str) -> None:
    """Raise AuthError unless the server of a connection has the key with this fingerprint."""
    _, found = _named(line.getpeercert(binary_form=True))
    if not hmac.compare_digest(found, fingerprint):
        raise AuthError(
            "another process answers there", given=found[:16], expected=fingerprint[:16]
        )


def _contexts(secret: bytes, name: str, key: MemberKey) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts to accept and to dial."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding

    seed = hmac.digest(secret, b"atoll: authority of those who know this", "sha256")
    signer = Ed25519PrivateKey.from_private_bytes(seed)
    authority = _certificate(_AUTHORITY, signer.public_key(), _AUTHORITY, signer, authority=True)
    own = _certificate(name, key.private.public_key(), _AUTHORITY, signer, authority=False)
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in contexts:
        context.check_hostname = False  # names are those of members
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=authority.public_bytes(Encoding.DER))
        _loaded(context, own, key)
    return contexts


def _loaded(context: ssl.SSLContext, own: Any, key: MemberKey) -> ssl.SSLContext:
    from cryptography.hazmat.primitives import serialization

    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if context.protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no resumption, and nothing to read but data
    pem = key.private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )  # fmt: skip
    # `ssl` loads keys from files only: one in a private folder, deleted at once.
    with tempfile.TemporaryDirectory(prefix="atoll-tls-") as folder:
        path = os.path.join(folder, "own.pem")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem + own.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(path)
    return context


def _certificate(name: str, key: Any, issuer: str, signer: Any, *, authority: bool) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def called(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(called(name))
        .issuer_name(called(issuer))
        .public_key(key)
        .serial_number(1 if authority else x509.random_serial_number())
        .not_valid_before(_EVER[0])
        .not_valid_after(_EVER[1])
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(signer, None)
    )


def _named(certificate: bytes | None) -> tuple[str, str]:
    """Return name and fingerprint of a certificate."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    if certificate is None:
        raise AuthError("the other side of a direct connection has no certificate")
    read = x509.load_der_x509_certificate(certificate)
    names = read.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else "", _fingerprint(read.public_key())


def _fingerprint(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()
