"""Specs of codecs: every spelling that works, and help with those that do not."""

from __future__ import annotations

import pytest

from atoll.codec import base_spec, make_codec
from atoll.errors import ConfigError


@pytest.mark.parametrize(
    ("spec", "canonical", "base"),
    [
        ("fp32", "fp32", "fp32"),
        ("fp16", "fp16", "fp16"),
        (" bf16 ", "bf16", "bf16"),
        ("int8", "int8:256", "int8:256"),
        ("int8:128", "int8:128", "int8:128"),
        ("int8 : 128", "int8:128", "int8:128"),
        ("feedback(int8)", "feedback(int8:256)", "int8:256"),
        ("feedback( int8:64 )", "feedback(int8:64)", "int8:64"),
    ],
)
def test_spec_has_one_canonical_form_that_builds_the_same_codec(
    spec: str, canonical: str, base: str
) -> None:
    codec = make_codec(spec)
    assert codec.spec == canonical
    assert make_codec(codec.spec).spec == canonical
    assert codec.base.spec == base_spec(spec) == base


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int9", "unknown codec; given: 'int9'.*did you mean 'int8'"),
        ("", "unknown codec"),
        ("feedbak(int8)", "did you mean 'feedback'"),
        ("feedback(int7)", "unknown codec; given: 'int7'"),
        ("feedback", r"wraps another codec.*feedback\(int8\)"),
        ("feedback(int8", "bracket is not closed"),
        ("feedback()", "unknown codec"),
        ("feedback(feedback(int8))", "wrapped already"),
        ("fp32:8", "takes no number"),
        ("int8:", "number of codec int8 is wrong"),
        ("int8:x", "number of codec int8 is wrong"),
        ("int8:-256", "number of codec int8 is wrong"),
        ("int8:4", "out of range"),
        ("int8:99999", "out of range"),
    ],
)
def test_wrong_spec_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_codec(spec)


def test_every_call_builds_a_codec_with_state_of_its_own() -> None:
    assert make_codec("feedback(int8)") is not make_codec("feedback(int8)")
