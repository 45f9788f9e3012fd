"""auto: which codec pays on which link, and that all members say the same."""

from __future__ import annotations

import pytest
import torch

from atoll.codec import make_codec
from atoll.codec.wrappers.auto import EVERY, FIRST, SLOWEST, STEPS, TELLING_BYTES, Auto, auto_inside
from atoll.errors import ConfigError, WireError

MBIT = 1e6 / 8
ELEMENTS = 10_000_000


def automatic(spec: str = "feedback(auto)") -> Auto:
    codec = make_codec(spec)
    codec.set_shapes([(ELEMENTS,)])
    auto = auto_inside(codec)
    assert auto is not None
    return auto


def agree(*members: Auto) -> None:
    mean = torch.stack([auto.ladder() for auto in members]).mean(0)
    for auto in members:
        auto.agree(mean)


@pytest.mark.parametrize(
    ("bytes_per_s", "expected"),
    [
        (20e9, "fp32"),
        (100_000 * MBIT, "fp32"),
        (2_000 * MBIT, "int8:256"),
        (100 * MBIT, "int4:256"),
        (10 * MBIT, "int4:256"),
        (1e3, "int4:256"),
    ],
)
def test_fast_links_keep_precision_and_slow_ones_do_not(bytes_per_s: float, expected: str) -> None:
    auto = automatic()
    auto.observe(10_000_000, 10_000_000 / bytes_per_s)
    agree(auto)
    assert auto.base.spec == expected


def test_without_feedback_nothing_coarser_than_int8_is_chosen() -> None:
    auto = automatic("auto")
    auto.observe(1_000_000, 1000.0)
    agree(auto)
    assert auto.base.spec == "int8:256"


def test_slower_links_never_get_a_more_precise_codec() -> None:
    auto = automatic()
    choices = [auto.chosen(SLOWEST * 2 ** (step / 2)) for step in range(STEPS)]
    assert choices == sorted(choices, reverse=True)
    assert set(choices) >= {0, 2, 3}


def test_all_take_the_codec_of_the_slowest_link() -> None:
    fast, slow, unknown = automatic(), automatic(), automatic()
    fast.observe(40_000_000, 0.004)
    slow.observe(40_000_000, 32.0)
    agree(fast, slow, unknown)
    assert {auto.base.spec for auto in (fast, slow, unknown)} == {"int4:256"}


def test_where_nobody_measured_anything_nothing_is_given_up() -> None:
    auto = automatic()
    auto.observe(TELLING_BYTES - 1, 100.0)  # that was delay, not speed
    agree(auto)
    assert auto.base.spec == "fp32"
    assert not auto.agreed


def test_members_agree_at_once_and_then_now_and_then() -> None:
    auto = automatic()
    assert [round_ for round_ in range(EVERY) if auto.due(round_)] == list(range(FIRST))
    auto.observe(1_000_000, 1.0)
    agree(auto)
    assert [round_ for round_ in range(1, 3 * EVERY) if auto.due(round_)] == [EVERY, 2 * EVERY]


def test_choice_is_shared_state_and_residuals_outlive_a_change() -> None:
    codec, newcomer = make_codec("feedback(auto)"), make_codec("feedback(auto)")
    codec.encode(torch.randn(5000), key="k")
    codec.finish(committed=True)
    auto, other = auto_inside(codec), auto_inside(newcomer)
    assert auto is not None
    assert other is not None
    auto.choice, auto.agreed = 3, True
    x = torch.randn(5000)
    lost = x - codec.decode(codec.encode(x, key="k"))
    codec.finish(committed=True)
    auto.choice = 2
    packet = codec.encode(torch.zeros(5000), key="k")
    assert packet.codec == "int8:256"
    assert float((codec.decode(packet) - lost).norm() / lost.norm()) < 0.01
    state = codec.state_dict()
    newcomer.load_state_dict({k: v for k, v in state.items() if k.startswith("shared.")})
    assert (other.choice, other.agreed) == (2, True)


def test_only_packets_of_its_codecs_are_decoded() -> None:
    auto, x = automatic("auto(fp32,int8)"), torch.randn(1000)
    auto.choice = 1
    packet = auto.encode(x)
    auto.choice = 0
    assert torch.equal(auto.decode(packet), make_codec("int8").decode(packet))
    with pytest.raises(WireError, match="wrong codec"):
        auto.decode(make_codec("bf16").encode(x))


@pytest.mark.parametrize("choice", [[2, 1, 0], [-1, 1, 0], [1, 1]])
def test_state_with_another_choice_is_refused(choice: list[int]) -> None:
    state = {"shared.auto.choice": torch.tensor(choice)}
    with pytest.raises(ConfigError, match="another codec"):
        automatic("auto(fp32,int8)").load_state_dict(state)


@pytest.mark.parametrize(
    ("spec", "begins"),
    [
        ("auto", "fp32"), ("auto:int8", "int8:256"), ("auto:bf16", "bf16"),
        ("feedback(auto:int4:256)", "int4:256"), ("feedback(auto:int8)", "int8:256"),
        ("auto:int8(fp32,int8)", "int8:256"),
    ],
)  # fmt: skip
def test_it_begins_with_the_codec_behind_the_colon(spec: str, begins: str) -> None:
    auto = automatic(spec)
    assert auto.base.spec == begins
    assert not auto.agreed
    auto.observe(10_000_000, 1e-3)  # a fast line: measured rounds have the last word
    agree(auto)
    assert auto.base.spec == "fp32"


def test_it_cannot_begin_with_a_codec_that_is_not_its_own() -> None:
    with pytest.raises(ConfigError, match="none of its own"):
        make_codec("auto:int8(fp32,bf16)")


def test_what_the_hub_plans_holds_until_members_have_agreed_anew() -> None:
    auto, newcomer = automatic(), automatic()
    auto.observe(10_000_000, 10.0)
    agree(auto)
    auto.follow("feedback(int8:256)", round_=120)
    assert auto.base.spec == "int8:256"
    assert [round_ for round_ in range(119, 140) if auto.due(round_)] == list(range(119, 130))
    newcomer.load_state_dict(auto.state_dict())
    assert newcomer.due(125)
    agree(auto)
    assert auto.base.spec == "int4:256"
    assert not auto.due(125)


@pytest.mark.parametrize(
    ("spec", "planned"),
    [
        ("auto(by_size:65536(fp32,int8),int4)", "by_size:65536(fp32,int8)"),
        ("feedback(auto(by_size:65536(fp32,int8),int4))", "feedback(by_size:65536(fp32,int8))"),
        ("feedback(auto(randomk:0.1,topk:0.01))", "feedback(randomk:0.1)"),
        ("feedback:0.95(auto(fp32,int8))", "feedback:0.95(int8)"),
    ],
)  # fmt: skip
def test_codecs_with_brackets_and_scales_can_be_chosen(spec: str, planned: str) -> None:
    auto = automatic(spec)
    assert auto.choice == 0
    auto.follow(planned, round_=1)
    assert auto.base.spec in make_codec(planned).spec
