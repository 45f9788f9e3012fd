"""The hub's pairing code: its life, its tries, and exchanges that compete for it."""

from __future__ import annotations

import asyncio

import pytest

from atoll.clock import VirtualClock
from atoll.errors import AuthError, WrongCode
from atoll.hub.security.pairing import (
    EXCHANGE_S,
    MAX_EXCHANGES,
    TRIES,
    VALID_S,
    Pairing,
    PairingState,
)
from atoll.wire.pairing import PairShare, side
from atoll.wire.spake2 import Keys, Password, Side


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def pairing(clock: VirtualClock) -> Pairing:
    return Pairing(clock)


def begun(pairing: Pairing, code: str) -> tuple[str, Keys]:
    """Take the first step with a code; return the exchange and the joiner's keys."""
    own: Side = side(Password.of_code(code), is_joiner=True)
    sent = own.share()
    answer: PairShare = asyncio.run(pairing.start(sent))
    return answer.exchange, own.keys(sent, answer.share)


def wrong(code: str) -> str:
    """Return another code."""
    return code[:-1] + str((int(code[-1]) + 1) % 10)


def test_right_code_admits_one_machine_and_is_then_used(pairing: Pairing) -> None:
    code = pairing.show().code
    exchange, keys = begun(pairing, code)
    late, others = begun(pairing, code)
    assert pairing.finish(exchange, keys.mac_a) == keys
    with pytest.raises(AuthError, match="no open pairing code"):
        pairing.finish(late, others.mac_a)
    assert pairing.show().code != code


def test_three_wrong_tries_end_the_code_until_renewed(
    pairing: Pairing, clock: VirtualClock
) -> None:
    code = pairing.show().code
    right, keys = begun(pairing, code)
    for left in reversed(range(TRIES)):
        exchange, guessed = begun(pairing, wrong(code))
        with pytest.raises(WrongCode, match=f"{left} tr") as caught:
            pairing.finish(exchange, guessed.mac_a)
        assert str(caught.value.given).startswith(str(left))
    with pytest.raises(AuthError, match="ended after wrong tries"):
        pairing.finish(right, keys.mac_a)
    clock.advance(VALID_S)
    shown = pairing.show()  # what pages and `atoll up` ask for by themselves opens nothing
    assert (shown.state, shown.code) == (PairingState.BLOCKED, "")
    assert pairing.show(renew=True).tries_left == TRIES
    assert pairing.state is PairingState.OPEN


def test_exchanges_started_together_share_the_tries(pairing: Pairing) -> None:
    code = pairing.show().code
    started = [begun(pairing, wrong(code)) for _ in range(TRIES + 2)]
    refused = []
    for exchange, keys in started:
        with pytest.raises(AuthError) as caught:
            pairing.finish(exchange, keys.mac_a)
        refused.append(type(caught.value))
    assert refused == [WrongCode] * TRIES + [AuthError] * 2


def test_expired_code_is_replaced_and_its_tries_stay(pairing: Pairing, clock: VirtualClock) -> None:
    code = pairing.show().code
    exchange, keys = begun(pairing, wrong(code))
    with pytest.raises(WrongCode):
        pairing.finish(exchange, keys.mac_a)
    clock.advance(VALID_S)
    with pytest.raises(AuthError, match="expired"):
        begun(pairing, code)
    shown = pairing.show()
    assert shown.code != code
    assert shown.tries_left == TRIES - 1


def test_exchanges_end_by_time_and_are_bounded(pairing: Pairing, clock: VirtualClock) -> None:
    code = pairing.show().code
    first, keys = begun(pairing, code)
    for _ in range(MAX_EXCHANGES):
        begun(pairing, code)
    with pytest.raises(AuthError, match="too long"):
        pairing.finish(first, keys.mac_a)
    slow, keys = begun(pairing, code)
    clock.advance(EXCHANGE_S)
    with pytest.raises(AuthError, match="too long"):
        pairing.finish(slow, keys.mac_a)
    assert pairing.show().tries_left == TRIES  # neither was a guess


def test_hub_without_an_asked_for_code_admits_nobody(pairing: Pairing) -> None:
    with pytest.raises(AuthError, match="no open pairing code"):
        begun(pairing, "000-000")
