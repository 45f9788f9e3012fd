from __future__ import annotations

from bench.rl.collect import atoll_loop, measured, plain_loop


def test_paces_are_compared_in_pairs() -> None:
    found = measured("CartPole-v1", turns=2, slice_s=0.02, ways=["alone", "plain", "atoll"])
    assert found["alone"] > found["plain"] > 0
    low, high = found["to_alone_quartiles"]
    assert low <= found["to_alone"] <= high


def test_continuous_actions_are_collected_too() -> None:
    for loop in (plain_loop("Pendulum-v1"), atoll_loop("Pendulum-v1")):
        loop()
