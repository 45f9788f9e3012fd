"""Specs of codecs: every spelling that works, and help with those that do not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codec import base_spec, make_codec
from atoll.errors import ConfigError
from atoll.methods.codecs import CODECS
from tests.tiers import examples


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
        ("int4", "int4:256", "int4:256"),
        ("qsgd", "qsgd:127", "qsgd:127"),
        ("sigma8", "sigma8:6", "sigma8:6"),
        ("sigma8:12:centred", "sigma8:12:centred", "sigma8:12:centred"),
        ("dct:32|bf16", "dct:32|bf16", "dct:32|bf16"),
        ("feedback(lowrank:4)", "feedback(lowrank:4)", "lowrank:4"),
        ("topk:.010", "topk:0.01", "topk:0.01"),
        ("topk:1e-2 | fp32", "topk:0.01", "topk:0.01"),
        ("topk:0.01|int8", "topk:0.01|int8:256", "topk:0.01|int8:256"),
        (
            "feedback:.95(topk:.015625:4096|mean2)",
            "feedback:0.95(topk:0.015625:4096|mean2)",
            "topk:0.015625:4096|mean2",
        ),
        ("feedback:1(int8)", "feedback(int8:256)", "int8:256"),
        ("randomk:0.1", "randomk:0.1", "randomk:0.1"),
        ("feedback(randomk:0.1)", "feedback(randomk:0.1:plain)", "randomk:0.1:plain"),
        ("auto", "auto", "fp32"),
        ("auto(fp32, int4)", "auto(fp32,int4:256)", "fp32"),
        ("feedback(auto)", "feedback(auto)", "fp32"),
        ("by_role(int4,bf16)", "by_role(int4:256,bf16)", "by_role(int4:256,bf16)"),
        ("ef21(topk:0.1|int8)", "ef21(topk:0.1|int8:256)", "topk:0.1|int8:256"),
        (
            "by_size:100(fp32,int8)",
            "by_size:100(fp32,int8:256)",
            "by_size:100(fp32,int8:256)",
        ),
        (
            "feedback( randomk:0.1 | topk:0.2 | int4 )",
            "feedback(randomk:0.1:plain|topk:0.2|int4:256)",
            "randomk:0.1:plain|topk:0.2|int4:256",
        ),
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
        ("int8:" + "9" * 5000, "spec is too long; given: 5005 characters"),
        ("int8:" + "9" * 500, "number of codec int8 is wrong"),
        ("feedback(" * 90 + "fp32" + ")" * 90, "too many brackets"),
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
        ("int4:100", "multiple of 8"),
        ("topk", "number of codec topk is wrong.*e.g. topk:0.01"),
        ("topk:half", "number of codec topk is wrong"),
        ("topk:0", "above 0 and at most 1"),
        ("topk:nan", "above 0 and at most 1"),
        ("topk:1.5", "above 0 and at most 1"),
        ("topk:0.1:1", "chunk of codec topk is too small"),
        ("topk:0.1:-4", "number of codec topk is wrong"),
        ("topk:0.1:4096:2", "takes no more than 2 numbers"),
        ("feedback:1.5(int8)", "decay of error feedback is out of range"),
        ("feedback:0(int8)", "decay of error feedback is out of range"),
        ("feedback:much(int8)", "number of codec feedback is wrong"),
        ("randomk:0.0001", "at least one element of 4096"),
        ("randomk:0.1:fast", "number of codec randomk is wrong"),
        ("qsgd:128", "1 to 127"),
        ("int8|topk:0.1", "int8 cannot be followed.*one of topk, randomk, dct"),
        ("topk:0.1|topk:0.1", "only randomk can be followed"),
        ("topk:0.1|feedback(int8)", "cannot follow"),
        ("feedback(int8)|int4", "cannot stand before"),
        ("topk:0.1|", "unknown codec"),
        ("feedback(int8)x", "something follows"),
        ("int8)", "never opened"),
        ("feedback(int8, int4)", "cannot wrap several"),
        ("topk:0.1|lowrank:2", "cannot follow"),
        ("sigma8:7", "6 or 12 standard deviations"),
        ("sigma8:6:center", "number of codec sigma8 is wrong"),
        ("dct", "number of codec dct is wrong"),
        ("dct:5000", "1 to 4096"),
        ("lowrank:0", "1 to 256"),
        ("lowrank", "number of codec lowrank is wrong"),
        ("topk:0.1|auto", "cannot follow"),
        ("auto(fp32)", "at least two"),
        ("auto(fp32,feedback(int8))", r"wrapper outside: feedback\(auto"),
        ("by_size(fp32,int8)", "a number of elements and two codecs"),
        ("by_size:100(fp32,topk:0.1)", "packets that can be averaged"),
        ("by_role(int8)", "for matrices and one for all else"),
        ("by_role(lowrank:2,bf16)", "do not depend on shapes"),
        ("by_role(feedback(int8),bf16)", r"outside: feedback\(by_role"),
        ("topk:0.1|by_role(int8,bf16)", "cannot follow"),
        ("ef21(qsgd:7)", "unbiased.*qsgd:7 alone"),
        ("ef21", r"wraps another codec.*ef21\(topk:0.1\)"),
        ("ef21(feedback(int8))", "wrapped already"),
        ("feedback(auto(int8,qsgd))", "unbiased"),
        ("feedback(qsgd)", "unbiased.*qsgd:127 alone"),
    ],
)
def test_wrong_spec_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_codec(spec)


def test_every_call_builds_a_codec_with_state_of_its_own() -> None:
    assert make_codec("feedback(int8)") is not make_codec("feedback(int8)")


texts = st.lists(
    st.one_of(
        st.sampled_from(
            [*CODECS, "|", "(", ")", ",", ":", "0.1", "-1", "1e99", "nan", "999999999"]
        ),
        st.text(max_size=3),
    ),
    max_size=12,
).map("".join)


@settings(max_examples=examples(300), deadline=None)
@given(texts, st.integers(0, 2**40))
def test_any_text_is_a_codec_or_a_configuration_error(text: str, elements: int) -> None:
    try:
        codec = make_codec(text)
    except ConfigError:
        return
    assert codec.nbytes(elements) >= 0
