"""Worth of machines: what is foretold is what happens, in a simulation with known speeds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from atoll.hub.rounds.node_value import LEAST_ROUNDS, marginal_throughput
from atoll.hub.rounds.timeline import CatchUp, Row
from tests.tiers import examples

STEPS = 50
TOKENS_PER_STEP = 100

TOLERANCE = 0.05
"""Between a rate that is foretold and the rate that then is measured, without noise."""
PACED_TOLERANCE = 0.1
"""The same where machines do whole numbers of steps in a period, which may be few."""
NOISY_TOLERANCE = 0.12
"""With steps whose times vary by a tenth."""


@dataclass(frozen=True)
class Laptop:
    """A machine: seconds of one step, and of the exchange in a group of two."""

    step_s: float
    exchange_s: float = 0.5
    uplink_s: float = 0.0
    """What its contribution takes longer to leave than others."""


def simulate(
    laptops: Mapping[str, Laptop], *, rounds: int = 12, paced: bool = False, noise: float = 0.0,
    route: str = "relay", seed: int = 1,
) -> list[CatchUp]:  # fmt: skip
    """Train with these machines and return what the hub would have seen."""
    words, now, passed = random.Random(seed), 1_000.0, []
    members = list(laptops)
    fastest = min(laptop.step_s for laptop in laptops.values())
    count = len(members)
    growth = (count - 1) / count / 0.5 if route == "direct" else count / 2
    apply_s = 0.2
    for number in range(rounds):
        steps = {
            m: max(1, round(STEPS * fastest / laptop.step_s)) if paced else STEPS
            for m, laptop in laptops.items()
        }
        compute_s = {
            m: sum(laptops[m].step_s * (1 + words.gauss(0, noise)) for _ in range(steps[m]))
            for m in members
        }
        last_s = max(compute_s.values())
        send_s = max(laptop.exchange_s for laptop in laptops.values()) * growth if count > 1 else 0
        slowest_s = max(laptop.uplink_s for laptop in laptops.values()) if count > 1 else 0.0
        uploads = {m: send_s / 2 + laptop.uplink_s for m, laptop in laptops.items()}
        send_s += slowest_s
        now += apply_s + last_s + send_s + (0.05 if count > 1 else 0.0)
        rows = [
            Row(
                member=m, node=f"node-{m}", compute_s=compute_s[m], wait_s=last_s - compute_s[m],
                send_s=send_s, vote_s=0.05 if count > 1 else 0.0, apply_s=apply_s,
                tokens=steps[m] * TOKENS_PER_STEP, steps=steps[m],
                upload_s=uploads[m] if slowest_s else None,
            )
            for m in members
        ]  # fmt: skip
        passed.append(
            CatchUp(number + 1, number, route if count > 1 else "alone", members, members, now,
                   send_s, 1_000, rows)
        )  # fmt: skip
    return passed


def rate(rounds: Sequence[CatchUp]) -> float:
    """Return the tokens per second that were really reached, the first round left out."""
    tokens = sum(row.tokens or 0 for one in rounds[1:] for row in one.rows)
    return tokens / (rounds[-1].time - rounds[0].time)


def check(
    laptops: Mapping[str, Laptop], gone: str, *, tolerance: float, **more: object
) -> tuple[float, float]:
    """Compare what is foretold without a machine with a run without it."""
    found = marginal_throughput(simulate(laptops, **more))  # type: ignore[arg-type]
    node = next(n for n in found["nodes"] if n["member"] == gone)
    foretold = found["tokens_per_s"] - node["adds_tokens_per_s"]
    rest = {m: laptop for m, laptop in laptops.items() if m != gone}
    really = rate(simulate(rest, **more))  # type: ignore[arg-type]
    assert foretold == pytest.approx(really, rel=tolerance)
    return found["tokens_per_s"], really


@settings(max_examples=examples(60), deadline=None)
@given(
    steps=st.lists(st.floats(0.02, 0.3), min_size=2, max_size=6), exchange_s=st.floats(0.05, 5.0),
    route=st.sampled_from(["relay", "direct"]), paced=st.booleans(), which=st.integers(0, 5),
)  # fmt: skip
@example(steps=[0.03125, 0.25, 0.25, 0.28125], exchange_s=1.0, route="relay", paced=True, which=0)
def test_rate_without_a_machine_is_foretold(
    steps: list[float], exchange_s: float, route: str, paced: bool, which: int
) -> None:
    assume(min(steps) * 25 > max(steps))
    laptops = {f"w{i}": Laptop(step_s, exchange_s) for i, step_s in enumerate(steps)}
    gone = f"w{which % len(steps)}"
    check(
        laptops, gone, tolerance=PACED_TOLERANCE if paced else TOLERANCE, route=route, paced=paced
    )


@settings(max_examples=examples(30), deadline=None)
@given(
    steps=st.lists(st.floats(0.05, 0.3), min_size=2, max_size=5), seed=st.integers(0, 1_000),
    which=st.integers(0, 4),
)  # fmt: skip
def test_noise_of_single_steps_changes_little(steps: list[float], seed: int, which: int) -> None:
    laptops = {f"w{i}": Laptop(step_s) for i, step_s in enumerate(steps)}
    gone = f"w{which % len(steps)}"
    check(laptops, gone, tolerance=NOISY_TOLERANCE, noise=0.1, seed=seed)


@settings(max_examples=examples(40), deadline=None)
@given(
    step_s=st.floats(0.02, 0.3), exchange_s=st.floats(0.05, 8.0), count=st.integers(2, 8),
    route=st.sampled_from(["relay", "direct"]),
)  # fmt: skip
def test_what_one_more_machine_adds_is_foretold(
    step_s: float, exchange_s: float, count: int, route: str
) -> None:
    laptops = {f"w{i}": Laptop(step_s, exchange_s) for i in range(count)}
    before = simulate(laptops, route=route)
    after = simulate(laptops | {"w99": Laptop(step_s, exchange_s)}, route=route)
    percent = 100 * (rate(after) / rate(before) - 1)
    found = marginal_throughput(before)["next"]
    assert found["adds_percent"] == pytest.approx(percent, abs=3.0)


def test_only_a_costly_slow_laptop_is_to_be_removed() -> None:
    laptops = {"w0": Laptop(0.1), "w1": Laptop(0.1), "w2": Laptop(0.6)}
    found = marginal_throughput(simulate(laptops))
    advices = {n["node"]: n["advice"] for n in found["nodes"]}
    assert advices == {"node-w0": "keep", "node-w1": "keep", "node-w2": "remove"}
    text = next(n["text"] for n in found["nodes"] if n["node"] == "node-w2")
    now, without = check(laptops, "w2", tolerance=TOLERANCE)
    assert without > 1.5 * now
    assert text == (
        f"remove node-w2: without it the group would reach {without:,.0f} tokens/s instead of "
        f"{now:,.0f}"
    )
    assert found["text"].endswith(text)
    assert found["speedup"] == pytest.approx(now / 1_000, rel=0.01)
    assert found["best_single"]["tokens_per_s"] == pytest.approx(1_000)


@settings(max_examples=examples(40), deadline=None)
@given(
    uplinks=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=6), which=st.integers(0, 5),
    exchange_s=st.floats(0.05, 5.0),
)  # fmt: skip
def test_what_a_slow_uplink_costs_is_foretold(
    uplinks: list[float], which: int, exchange_s: float
) -> None:
    slow = {f"w{i}": Laptop(0.1, exchange_s, uplink) for i, uplink in enumerate(uplinks)}
    quick = {name: Laptop(0.1, exchange_s) for name in ("w8", "w9")}
    check(slow | quick, f"w{which % len(uplinks)}", tolerance=TOLERANCE)


def test_laptop_with_a_slow_uplink_is_to_be_removed() -> None:
    laptops = {"w0": Laptop(0.1), "w1": Laptop(0.1), "w2": Laptop(0.1, uplink_s=20.0)}
    nodes = {n["node"]: n["advice"] for n in marginal_throughput(simulate(laptops))["nodes"]}
    assert nodes == {"node-w0": "keep", "node-w1": "keep", "node-w2": "remove"}


def test_slow_laptop_is_kept_if_its_steps_are_adapted() -> None:
    laptops = {"w0": Laptop(0.1), "w1": Laptop(0.1), "w2": Laptop(0.6)}
    found = marginal_throughput(simulate(laptops, paced=True))
    assert [n["advice"] for n in found["nodes"]] == ["keep"] * 3
    slow = found["nodes"][2]
    assert slow["adds_percent"] > 0
    assert slow["text"].startswith("keep node-w2: it adds ")


def test_a_fourth_node_in_plain_words() -> None:
    found = marginal_throughput(simulate({f"w{i}": Laptop(0.1, 0.2) for i in range(3)}))
    assert (
        found["next"]["text"] == f"a 4th node would add about {found['next']['adds_percent']:.0f} %"
    )
    assert 25 < found["next"]["adds_percent"] < 34
    assert found["text"].startswith("3 machines: ")
    slow = marginal_throughput(simulate({f"w{i}": Laptop(0.001, 60.0) for i in range(3)}))
    assert "would add nothing" in slow["next"]["text"] or slow["next"]["adds_percent"] < 1


def test_machines_with_several_members_are_judged_as_machines() -> None:
    rounds = simulate({"w0": Laptop(0.1), "w1": Laptop(0.2), "w2": Laptop(0.2)})
    both = [
        CatchUp(one.epoch, one.round, one.route, one.members, one.contributors, one.time,
               one.seconds, one.nbytes,
               [Row(**{n: getattr(r, n) for n in r.__struct_fields__} |
                    {"node": "a" if r.member == "w0" else "b"}) for r in one.rows])
        for one in rounds
    ]  # fmt: skip
    nodes = {n["node"]: n for n in marginal_throughput(both)["nodes"]}
    assert nodes["b"]["member"] == "w1, w2"
    assert nodes["b"]["advice"] == "keep"


def test_members_that_train_alone_cost_nobody_anything() -> None:
    laptops = {"w0": Laptop(0.1), "w1": Laptop(0.6)}
    found = marginal_throughput(simulate(laptops), alone=True)
    assert [n["advice"] for n in found["nodes"]] == ["keep", "keep"]
    assert sum(n["adds_tokens_per_s"] for n in found["nodes"]) == pytest.approx(
        found["tokens_per_s"]
    )


def test_too_early_is_said_and_counts() -> None:
    assert marginal_throughput([])["text"] == f"too early to say: 0 of {LEAST_ROUNDS} rounds"
    early = marginal_throughput(simulate({"w0": Laptop(0.1), "w1": Laptop(0.1)}, rounds=3))
    assert early["text"] == "too early to say: 2 of 5 rounds"
    assert [n["advice"] for n in early["nodes"]] == ["unknown", "unknown"]
    assert early["tokens_per_s"] is None


def test_scripts_that_count_no_tokens_are_measured_in_steps() -> None:
    rounds = [
        CatchUp(one.epoch, one.round, one.route, one.members, one.contributors, one.time,
               one.seconds, one.nbytes,
               [Row(**{n: getattr(r, n) for n in r.__struct_fields__} | {"tokens": 0})
                for r in one.rows])
        for one in simulate({"w0": Laptop(0.1), "w1": Laptop(0.1)})
    ]  # fmt: skip
    found = marginal_throughput(rounds)
    assert found["unit"] == "steps"
    assert "steps/s" in found["text"]


def test_one_machine_alone_is_the_only_one() -> None:
    found = marginal_throughput(simulate({"w0": Laptop(0.1)}))
    assert found["nodes"][0]["text"] == "node-w0 is the only machine"
    assert found["next"]["adds_percent"] is None


def test_a_round_in_which_a_machine_slept_changes_nothing() -> None:
    rounds = simulate({"w0": Laptop(0.1), "w1": Laptop(0.1)}, rounds=14)
    late = [
        CatchUp(one.epoch, one.round, one.route, one.members, one.contributors,
               one.time + (600.0 if one.round >= 7 else 0.0), one.seconds, one.nbytes, one.rows)
        for one in rounds
    ]  # fmt: skip
    assert marginal_throughput(late)["tokens_per_s"] == pytest.approx(
        marginal_throughput(rounds)["tokens_per_s"], rel=0.01
    )
    assert marginal_throughput(late)["rounds"] == 12


def test_figures_hold_until_there_is_a_new_one() -> None:
    laptops = {"w0": Laptop(0.1), "w1": Laptop(0.12), "w2": Laptop(0.11)}
    rounds = simulate(laptops, rounds=12)
    last = marginal_throughput(rounds)
    drained = marginal_throughput(rounds, running={"w0", "w1"})
    assert drained["nodes"] == last["nodes"]
    assert drained["text"] == f"at round 12: {last['text']}"
    after = simulate({"w0": Laptop(0.1), "w1": Laptop(0.12)}, rounds=2)
    later = [
        msgspec.structs.replace(one, round=12 + at, time=rounds[-1].time + 10.0 * (at + 1))
        for at, one in enumerate(after)
    ]
    assert marginal_throughput([*rounds, *later])["nodes"] == last["nodes"]
