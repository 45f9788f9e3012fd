"""The authorities of a hub that a machine has pinned: one, or two while the hub changes them.

A hub with an authority of its own lists its present and its next authority in every answer. A
client that has pinned one of them fetches the other over the authenticated connection, and so still
recognizes the hub after the change. Authorities that are no longer listed are dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import ssl
from collections.abc import Callable
from pathlib import Path

HEADER = "atoll-authorities"
"""Header of answers: fingerprints, separated by commas, the present authority first."""

FINGERPRINT_DIGITS = 40
"""Hexadecimal digits of a certificate's SHA-256: 160 bits."""

MOST = 2

_NAMED = re.compile(rf"[0-9a-f]{{{FINGERPRINT_DIGITS}}}")
_CERTIFICATE = re.compile(
    r"-----BEGIN CERTIFICATE-----\s.+?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)


def certificates(text: str) -> dict[str, str]:
    """Return the certificates of a PEM text by fingerprint; what cannot be read is left out."""
    found = {}
    for pem in _CERTIFICATE.findall(text):
        with contextlib.suppress(ValueError):
            der = ssl.PEM_cert_to_DER_cert(pem)
            found[fingerprint_of(der)] = ssl.DER_cert_to_PEM_cert(der)
    return found


def fingerprint_of(der: bytes) -> str:
    """Return the shortened SHA-256 of a certificate."""
    return hashlib.sha256(der).hexdigest()[:FINGERPRINT_DIGITS]


def fingerprints(path: Path) -> list[str]:
    """Return the fingerprints of the certificates in a file; empty if it cannot be read."""
    try:
        return list(certificates(path.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return []


def follow(path: Path, named: str, *, fetch: Callable[[str], str]) -> bool:
    """Pin the authorities that the hub names; return whether the file has changed.

    Args:
        path: File of the pinned authorities. One that cannot be written stays as it is.
        named: The header of an answer, whose connection MUST have been authenticated.
        fetch: Returns the PEM text of an authority by its fingerprint.
    """
    wanted = [one for one in named.split(",") if _NAMED.fullmatch(one)][:MOST]
    try:
        known = certificates(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    if not wanted or wanted == list(known) or not os.access(path.parent, os.W_OK):
        return False
    for one in wanted:
        if one not in known:
            known |= {k: pem for k, pem in certificates(fetch(one)).items() if k == one}
    if not set(wanted) <= known.keys():
        return False
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        scratch.write_text("".join(known[one] for one in wanted), encoding="ascii", newline="\n")
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        return False
    return True
