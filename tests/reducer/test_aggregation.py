from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError, PeerLost
from atoll.group.aggregation import Aggregation, exactly
from atoll.group.single import SingleGroup
from atoll.reducer.aggregation import (
    MAX_SPEC_CHARS,
    Rule,
    VectorAggregation,
    fitted,
    members_needed,
    parse_aggregate,
    parse_aggregation,
)
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("text", "spec", "needed"),
    [
        ("mean", "mean", 1), ("median", "median", 1), ("trimmed:2", "trimmed:2", 5),
        (" krum : 1 ", "krum:1", 5), ("multi-krum:1:6", "multi-krum:1:6", 7),
        ("clip:0.10:3", "clip:0.1:3", 1), ("clip:inf", "clip:inf", 1),
        ("geometric-median", "geometric-median", 1), ("sum", "sum", 1),
    ],
)  # fmt: skip
def test_words_have_one_canonical_form(text: str, spec: str, needed: int) -> None:
    rule = parse_aggregate(text)
    assert rule.spec == spec
    assert parse_aggregate(rule.spec) == rule
    assert members_needed(rule) == needed


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ({"aggregate": "medain"}, "did you mean 'median'"),
        ({"aggregate": "krumm:1"}, "did you mean 'krum'"),
        ({"aggregate": "krum"}, "krum:F"),
        ({"aggregate": "median:3"}, "too many"),
        ({"aggregate": "trimmed:1.5"}, "whole number"),
        ({"aggregate": "trimmed:-1"}, "out of range"),
        ({"aggregate": "trimmed:nan"}, "out of range"),
        ({"aggregate": "clip:0"}, "out of range"),
        ({"aggregate": "clip:x"}, "is wrong"),
        ({"aggregate": "multi-krum:1:0"}, "out of range"),
        ({"admission": "norm"}, "did you mean 'norms'"),
        ({"admission": "norms:0.5"}, "out of range"),
        ({"collective": "rings"}, "did you mean 'ring'"),
        ({"aggregate": "median", "collective": "ring"}, "sends partial sums"),
        ({"aggregate": "krum:1", "collective": "star"}, "needs the reducer"),
        ({"admission": "norms", "collective": "tree"}, "sends partial sums"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: dict[str, str], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        Aggregation(**words)


def test_what_an_aggregation_needs() -> None:
    plain = Aggregation()
    assert plain.spec("delta") == ""
    assert not plain.robust
    assert not Aggregation(aggregate="sum").robust
    median = Aggregation(aggregate="median", collective="star")
    assert median.robust
    assert not median.needs_reducer
    assert median.spec("delta") == "median/finite/delta"
    for words in ({"aggregate": "krum:1"}, {"aggregate": "clip:1"}, {"admission": "norms"}):
        assert Aggregation(**words).needs_reducer
    assert Aggregation(admission="norms:3").spec("a/b") == "mean/norms:3/a/b"
    assert parse_aggregation("mean/norms:3/a/b").key == "a/b"


@given(st.text(max_size=MAX_SPEC_CHARS + 20))
def test_any_text_on_the_wire_is_an_aggregation_or_an_error(text: str) -> None:
    try:
        found = parse_aggregation(text)
    except ConfigError:
        return
    assert isinstance(found, VectorAggregation)


@given(st.integers(0, 5), st.integers(1, 20), st.integers(0, 6))
def test_a_rule_gives_up_no_more_than_was_found(bad: int, members: int, found: int) -> None:
    for name in ("trimmed", "krum", "multi-krum"):
        rule = Rule(name, (float(bad),))
        try:
            lower = fitted(rule, members, found=found)
        except PeerLost:
            assert members < members_needed(Rule(name, (float(max(0, bad - found)),)))
            continue
        assert bad - found <= lower.numbers[0] <= bad
        assert members >= members_needed(lower)
        if members >= members_needed(rule):
            assert lower == rule


def test_deterministic_mode_is_scoped() -> None:
    group = SingleGroup()
    for words, inside in (
        ({"aggregate": "clip:1"}, "median"), ({"admission": "norms"}, "median"),
        ({"aggregate": "sum"}, "mean"), ({"collective": "ring"}, "mean"),
    ):  # fmt: skip
        group.aggregation = before = Aggregation(**words)
        with exactly(group):
            assert group.aggregation == Aggregation(aggregate=inside)
        assert group.aggregation is before


def test_reading_aggregations_loads_no_torch() -> None:
    code = "import sys, atoll.group.aggregation; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode
        == 0
    )
