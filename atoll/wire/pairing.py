"""Pairing by a short code: the messages, and the ticket that they carry encrypted.

1. The joiner sends its share (`PairStart`); the hub answers with its own (`PairShare`).
2. The joiner proves that it has the key (`PairProof`). Only then does the hub prove the same and
   send a ticket, encrypted with the key (`PairTicket`). The ticket contains the fingerprint of the
   hub's authority, so a party that relays these messages is noticed at the next connection.

`atoll/wire/spake2.py` is the exchange itself, `docs/decisions/0008-pairing-by-a-code.md` says why.
"""

from __future__ import annotations

import re
import secrets

import msgspec

from atoll.errors import AuthError, ConfigError
from atoll.wire.spake2 import Keys, Password, Side, expanded

DIGITS = 6
JOINER, HUB = b"atoll joiner", b"atoll hub"
"""Names of the two sides in the exchange."""

_NONCE_BYTES = 12
_LABEL = b"atoll pairing ticket"


class PairStart(msgspec.Struct, frozen=True):
    """Body of POST /api/pair."""

    share: bytes


class PairShare(msgspec.Struct, frozen=True):
    """Answer to `PairStart`."""

    exchange: str
    """Names this exchange in `PairProof`."""
    share: bytes


class PairProof(msgspec.Struct, frozen=True):
    """Body of POST /api/pair/finish."""

    exchange: str
    proof: bytes


class PairTicket(msgspec.Struct, frozen=True):
    """Answer to `PairProof`."""

    proof: bytes
    sealed: bytes


def new_code() -> str:
    """Return a random code as people see it, e.g. `123-456`."""
    digits = f"{secrets.randbelow(10**DIGITS):0{DIGITS}d}"
    return f"{digits[: DIGITS // 2]}-{digits[DIGITS // 2 :]}"


def read_code(text: str) -> str:
    """Return a typed code in the form of `new_code`.

    Raises:
        ConfigError: it is not a code.
    """
    digits = re.sub(r"[\s-]", "", text)
    if not re.fullmatch(rf"[0-9]{{{DIGITS}}}", digits):
        raise ConfigError(
            "this is not a pairing code", given=repr(text[:40]), expected="six digits, e.g. 123-456"
        )
    return f"{digits[: DIGITS // 2]}-{digits[DIGITS // 2 :]}"


def side(password: Password, *, is_joiner: bool) -> Side:
    """Return one side of a new exchange."""
    return Side(password=password, is_a=is_joiner, identity_a=JOINER, identity_b=HUB)


def seal(ticket: str, keys: Keys) -> bytes:
    """Return a ticket, encrypted for the other side."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = secrets.token_bytes(_NONCE_BYTES)
    cipher = ChaCha20Poly1305(expanded(keys.key, _LABEL))
    return nonce + cipher.encrypt(nonce, ticket.encode(), _LABEL)


def unseal(sealed: bytes, keys: Keys) -> str:
    """Return the ticket; raises AuthError if it was not sealed with these keys."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    cipher = ChaCha20Poly1305(expanded(keys.key, _LABEL))
    nonce, rest = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
    try:
        return cipher.decrypt(nonce, rest, _LABEL).decode()
    except (InvalidTag, ValueError) as error:
        raise AuthError("the ticket of a pairing was changed on its way") from error
