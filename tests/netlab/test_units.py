from __future__ import annotations

import pytest

from atoll.errors import ConfigError
from atoll.netlab.shape import LEAST_QUEUE_S, parse_shape
from atoll.netlab.units import parse_rate, parse_share, parse_time


def test_quantities_are_read_as_people_write_them() -> None:
    assert parse_rate("20mbit") == 20e6
    assert parse_rate(" 1.5 Gbit ") == 1.5e9
    assert parse_rate("unlimited") == parse_rate("") == 0
    assert parse_time("60ms") == pytest.approx(0.06)
    assert parse_time("") == 0
    assert parse_share("0.5%") == pytest.approx(0.005)
    assert parse_share("0.25") == 0.25


@pytest.mark.parametrize("text", ["20", "fast", "-3mbit", "20 mbps", "1e3kbit", "mbit"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="20mbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["100%", "1", "250%"])
def test_losing_everything_is_not_a_loss(text: str) -> None:
    with pytest.raises(ConfigError, match="less than 100%"):
        parse_share(text)


def test_a_rate_too_low_for_a_packet_a_second_is_refused() -> None:
    with pytest.raises(ConfigError, match="too low"):
        parse_rate("1kbit")


def test_one_rate_is_both_directions_unless_one_is_given() -> None:
    shape = parse_shape(rate="100mbit", up="20mbit", rtt="80ms")
    assert (shape.up_bps, shape.down_bps) == (20e6, 100e6)
    assert shape.queue_limit_s == LEAST_QUEUE_S
    assert parse_shape(rtt="300ms").queue_limit_s == pytest.approx(0.3)
    assert parse_shape(rtt="300ms", queue="50ms").queue_limit_s == pytest.approx(0.05)
