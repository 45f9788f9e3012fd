"""SPAKE2: two sides that share a short code agree on a strong key (a PAKE).

RFC 9382, suite SPAKE2-P256-SHA256-HKDF-HMAC (https://www.rfc-editor.org/rfc/rfc9382). A side that
does not know the code learns nothing to be tried offline: one run of the protocol is one guess,
also for a man in the middle. A is the side that joins, B the hub.

The arithmetic is in Python, so its time depends on the numbers. The code's number `w` is therefore
multiplied once per code, before any message (:class:`Password`); an exchange multiplies a random
secret that is used once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from atoll.errors import WireError

P = 2**256 - 2**224 + 2**192 + 2**96 - 1
"""Field of P-256 (FIPS 186-4, D.1.2.3); `ORDER` is that of its group."""
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B

Point = tuple[int, int] | None
"""Affine coordinates; None is the point at infinity."""

G: Point = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)

SHARE_BYTES = 65
"""Length of an uncompressed point."""
KEY_BYTES = 16
MAC_BYTES = 32

_ROUNDS = 10_000
"""Of PBKDF2. They slow no attack on the protocol, only one on a leaked `w`."""


def _from_x(x: int, *, odd: bool) -> Point:
    y = pow(x * x * x - 3 * x + _B, (P + 1) // 4, P)
    return (x, y if y % 2 == odd else P - y)


M = _from_x(0x886E2F97ACE46E55BA9DD7242579F2993B64E16EF3DCAB95AFD497333D8FA12F, odd=False)
N = _from_x(0xD8BBD6C639C62937B04D997F38C3770719C629D7014D49A24B4F98BAA1292B49, odd=True)
"""Constants of RFC 9382, section 4, without a known logarithm."""


@dataclass(frozen=True, slots=True, repr=False)
class Password:
    """The number `w` of a code, and its multiples of the constants M and N."""

    w: int
    m: Point
    n: Point

    @classmethod
    def of(cls, w: int) -> Password:
        """Return the password of a number from 1 to `ORDER` - 1."""
        return cls(w, multiplied(w, M), multiplied(w, N))

    @classmethod
    def of_code(cls, code: str) -> Password:
        """Return the password of a pairing code."""
        made = hashlib.pbkdf2_hmac(
            "sha256", code.encode(), b"atoll pairing code", _ROUNDS, dklen=48
        )
        return cls.of(int.from_bytes(made) % (ORDER - 1) + 1)


@dataclass(frozen=True, slots=True)
class Keys:
    """What both sides have in common after the exchange, if they knew the same code."""

    key: bytes
    """16 bytes."""
    mac_a: bytes
    """Proof of A that it has the key, 32 bytes."""
    mac_b: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of one exchange; use it once."""

    password: Password
    is_a: bool
    identity_a: bytes
    identity_b: bytes
    secret: int = field(default_factory=lambda: secrets.randbelow(ORDER - 1) + 1, repr=False)

    def share(self) -> bytes:
        """Return the point to send, 65 bytes."""
        own = self.password.m if self.is_a else self.password.n
        return encoded(added(multiplied(self.secret, G), own))

    def keys(self, own: bytes, other: bytes) -> Keys:
        """Return the keys, from what was sent and what came.

        Raises:
            WireError: what came is not a point of the curve.
        """
        mask = self.password.n if self.is_a else self.password.m
        common = multiplied(self.secret, added(decoded(other), negated(mask)))
        if common is None:
            raise WireError("the other side of a pairing sent a forbidden point")
        shares = (own, other) if self.is_a else (other, own)
        return schedule(self.identity_a, self.identity_b, *shares, encoded(common), self.password.w)


def schedule(a: bytes, b: bytes, share_a: bytes, share_b: bytes, common: bytes, w: int) -> Keys:
    """Return the keys of a transcript (RFC 9382, sections 3.3 and 4)."""
    parts = (a, b, share_a, share_b, common, w.to_bytes(32))
    transcript = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    digest = hashlib.sha256(transcript).digest()
    confirming = expanded(digest[KEY_BYTES:], b"ConfirmationKeys")
    mac_a, mac_b = (
        hmac.digest(key, transcript, "sha256")
        for key in (confirming[:KEY_BYTES], confirming[KEY_BYTES:])
    )
    return Keys(digest[:KEY_BYTES], mac_a, mac_b)


def expanded(key: bytes, label: bytes) -> bytes:
    """Return 32 bytes derived from a key for one purpose (HKDF-SHA256 without salt)."""
    extracted = hmac.digest(bytes(32), key, "sha256")
    return hmac.digest(extracted, label + b"\x01", "sha256")


# ------------------------------------------------------------------------------------- points


def encoded(point: Point) -> bytes:
    """Return a point as 65 bytes, uncompressed."""
    assert point is not None
    return b"\x04" + point[0].to_bytes(32) + point[1].to_bytes(32)


def decoded(data: bytes) -> Point:
    """Return the point that 65 bytes stand for; raises WireError."""
    x, y = int.from_bytes(data[1:33]), int.from_bytes(data[33:])
    right = len(data) == SHARE_BYTES and data[0] == 4 and x < P and y < P
    if not right or (y * y - x * x * x + 3 * x - _B) % P:
        raise WireError(
            "the other side of a pairing sent no point of the curve",
            given=f"{len(data)} bytes",
            expected=f"{SHARE_BYTES} bytes",
        )
    return x, y


def negated(point: Point) -> Point:
    """Return minus a point."""
    return None if point is None else (point[0], -point[1] % P)


def added(left: Point, right: Point) -> Point:
    """Return the sum of two points."""
    if left is None or right is None:
        return left or right
    (x1, y1), (x2, y2) = left, right
    if x1 == x2:
        if (y1 + y2) % P == 0:
            return None
        slope = 3 * (x1 * x1 - 1) * pow(2 * y1, -1, P)
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, P)
    x3 = (slope * slope - x1 - x2) % P
    return x3, (slope * (x1 - x3) - y1) % P


def multiplied(number: int, point: Point) -> Point:
    """Return a multiple of a point, with the same steps for every number (Montgomery's ladder)."""
    low, high = None, point
    for at in reversed(range(256)):
        both = added(low, high)
        if number >> at & 1:
            low, high = both, added(high, high)
        else:
            low, high = added(low, low), both
    return low
