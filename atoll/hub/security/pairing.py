"""Pairing codes: six digits that admit one machine for a few minutes, with three tries.

The hub keeps one code, in memory only. Wrong tries count until an operator asks for a new code or a
machine has used the right one: a code that expires is replaced, but its tries stay counted.
"""

from __future__ import annotations

import asyncio
import collections
import hmac
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.clock import Clock
from atoll.errors import AuthError, WrongCode
from atoll.ids import new_token
from atoll.wire.pairing import PairShare, new_code, side
from atoll.wire.spake2 import Keys, Password

VALID_S = 600.0
TRIES = 3

EXCHANGE_S = 30.0
"""How long an exchange may take; machines need less than one second."""

MAX_EXCHANGES = 8
"""Exchanges in progress; the oldest is dropped for a new one."""


class PairingState(StrEnum):
    """State of the hub's pairing code."""

    NONE = "none"
    """None was requested yet, or a machine has used it."""
    OPEN = "open"
    EXPIRED = "expired"
    BLOCKED = "blocked"
    """By wrong tries; only an operator's request makes another."""


@dataclass(frozen=True, slots=True)
class ShownCode:
    """What operators see."""

    state: PairingState
    code: str
    """Empty unless open."""
    left_s: float
    tries_left: int


@dataclass(frozen=True, slots=True)
class _Exchange:
    keys: Keys
    serial: int
    """Of the code that it uses."""
    ends: float


@dataclass(slots=True)
class _Code:
    text: str = ""
    password: Password | None = None
    serial: int = 0
    ends: float = 0.0
    tries_left: int = TRIES
    exchanges: collections.OrderedDict[str, _Exchange] = field(
        default_factory=collections.OrderedDict
    )


class Pairing:
    """The hub's side of pairings."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._code = _Code()

    @property
    def state(self) -> PairingState:
        """State of the code."""
        if self._code.tries_left <= 0:
            return PairingState.BLOCKED
        if not self._code.text:
            return PairingState.NONE
        expired = self._clock.monotonic() >= self._code.ends
        return PairingState.EXPIRED if expired else PairingState.OPEN

    def show(self, *, renew: bool = False) -> ShownCode:
        """Return the code, a new one if none is open; `renew` also ends an open or blocked one."""
        if renew or self.state in (PairingState.NONE, PairingState.EXPIRED):
            self._make(tries=TRIES if renew else self._code.tries_left)
        state = self.state
        return ShownCode(
            state=state,
            code=self._code.text if state is PairingState.OPEN else "",
            left_s=max(0.0, self._code.ends - self._clock.monotonic()),
            tries_left=self._code.tries_left,
        )

    def _make(self, *, tries: int) -> None:
        text = new_code()
        self._code = _Code(
            text=text,
            password=Password.of_code(text),
            serial=self._code.serial + 1,
            ends=self._clock.monotonic() + VALID_S,
            tries_left=tries,
        )

    async def start(self, share: bytes) -> PairShare:
        """Answer a joiner's share.

        Raises:
            AuthError: no code is open.
            WireError: the share is not a point.
        """
        self._check_open()
        code = self._code
        assert code.password is not None  # of every open code
        own = side(code.password, is_joiner=False)
        sent, keys = await asyncio.to_thread(lambda: (mine := own.share(), own.keys(mine, share)))
        now = self._clock.monotonic()
        exchanges, name = code.exchanges, new_token()
        while exchanges and (
            len(exchanges) >= MAX_EXCHANGES or next(iter(exchanges.values())).ends <= now
        ):
            exchanges.popitem(last=False)
        exchanges[name] = _Exchange(keys, code.serial, now + EXCHANGE_S)
        return PairShare(name, sent)

    def finish(self, exchange: str, proof: bytes) -> Keys:
        """Use up the code for a joiner that has proved to know it; return the common keys.

        Raises:
            WrongCode: the code is wrong; `given` says how many tries are left.
            AuthError: the code is used, expired or blocked, or the exchange is unknown.
        """
        self._check_open()
        found = self._code.exchanges.pop(exchange, None)
        if found is None or found.ends <= self._clock.monotonic():
            raise AuthError("this pairing took too long", remedy="type the code again")
        if not hmac.compare_digest(found.keys.mac_a, proof):
            self._code.tries_left -= 1
            raise self._wrong()
        self._code = _Code(serial=self._code.serial)
        return found.keys

    def _wrong(self) -> WrongCode:
        left = self._code.tries_left
        if left <= 0:
            remedy = _MAKE_ANOTHER
        else:
            remedy = "type the code that `atoll up` or the hub's page shows now"
        given = f"{left} {'try' if left == 1 else 'tries'} left"
        return WrongCode("this pairing code is wrong", given=given, remedy=remedy)

    def _check_open(self) -> None:
        state = self.state
        if state is PairingState.OPEN:
            return
        what = {
            PairingState.NONE: "the hub has no open pairing code",
            PairingState.EXPIRED: "the hub's pairing code has expired",
            PairingState.BLOCKED: "the hub's pairing code ended after wrong tries",
        }[state]
        raise AuthError(what, remedy=_MAKE_ANOTHER)


_MAKE_ANOTHER = "`atoll ticket code` on the hub's machine, or its page, shows a new code"
