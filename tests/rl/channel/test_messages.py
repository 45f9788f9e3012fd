"""Trajectories and weights as messages: everything comes back, nothing is believed unseen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atoll.errors import DataError
from atoll.queues.serialization import decode, encode, size
from atoll.rl.channel.messages import (
    ABOUT,
    decode_snapshot,
    decode_trajectory,
    encode_snapshot,
    encode_trajectory,
    with_metadata,
)
from atoll.rl.environments.spaces import Actions
from atoll.rl.trajectory import Trajectory
from tests.rl.channel.kit import SPEC, trajectory


def over_the_wire(message: dict[str, Tensor]) -> dict[str, Tensor]:
    found = decode(b"".join(encode(message)))
    assert isinstance(found, dict)
    return found


def full() -> Trajectory:
    return dataclasses.replace(
        trajectory(), actor="w1", sequence=7, policy_version=3, value_version=2,
        states=torch.randn(7, 2, 3), cut_states=torch.randn(1, 3), hidden=torch.randn(2, 5),
        scale=(torch.randn(4), torch.rand(4)),
    )  # fmt: skip


def test_everything_in_a_trajectory_comes_back_bit_for_bit() -> None:
    sent = full()
    got = decode_trajectory(over_the_wire(encode_trajectory(sent)), None)
    for field in dataclasses.fields(Trajectory):
        before, after = getattr(sent, field.name), getattr(got, field.name)
        if isinstance(before, Tensor):
            assert after.dtype == before.dtype, field.name
            assert torch.equal(after, before), field.name
        elif field.name == "scale":
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        else:
            assert after == before, field.name


def test_continuous_actions_and_uncut_data_round_trip() -> None:
    sent = trajectory()
    sent.actions = torch.randn(6, 2, 3)
    sent.truncated[:] = False
    sent.cut_at, sent.cut_observations = sent.cut_at[:0], sent.cut_observations[:0]
    spec = dataclasses.replace(SPEC, actions=Actions(kind="continuous", sizes=(3,)))
    got = decode_trajectory(over_the_wire(encode_trajectory(sent)), spec)
    assert torch.equal(got.actions, sent.actions)
    assert got.cut_observations.shape == (0, 4)
    assert got.check() is got


def test_a_message_shares_nothing_with_what_it_was_made_of() -> None:
    sent = trajectory()
    message = encode_trajectory(sent)
    before = {name: tensor.clone() for name, tensor in message.items()}
    for field in dataclasses.fields(Trajectory):
        value = getattr(sent, field.name)
        if isinstance(value, Tensor):
            value.zero_()
    assert all(torch.equal(message[name], before[name]) for name in before)


def test_a_step_costs_little_more_than_its_numbers() -> None:
    message = encode_trajectory(trajectory(steps=64, columns=8))
    per_step = size(encode(message)) / (64 * 8)
    numbers = 4 * 4 + 1 + 4 + 4 + 1  # observation, action, log-probability, reward, flags
    assert numbers < per_step < numbers + 3


def test_actions_take_the_smallest_integers_that_hold_them() -> None:
    for largest, dtype in ((255, torch.uint8), (256, torch.int16), (40_000, torch.int32)):
        sent = trajectory()
        sent.actions[0, 0, 0] = largest
        message = encode_trajectory(sent)
        assert message["actions"].dtype == dtype
        assert torch.equal(decode_trajectory(message, None).actions, sent.actions)


def wrong_version(m: dict[str, Tensor]) -> None:
    m[ABOUT] = torch.frombuffer(bytearray(m[ABOUT].numpy().tobytes().replace(b'"format":1', b'"format":2')), dtype=torch.uint8)  # noqa: E501 # fmt: skip


def another_kind(m: dict[str, Tensor]) -> None:
    m[ABOUT] = with_metadata({}, "snapshot")[ABOUT]


def negative_sequence(m: dict[str, Tensor]) -> None:
    header = dict.fromkeys(("sequence", "policy_version", "value_version"), -1)
    m[ABOUT] = with_metadata({}, "trajectory", policy="p", actor="a", returns=[], **header)[ABOUT]


def wide_observations(m: dict[str, Tensor]) -> None:
    m["observations"] = torch.randn(7, 2, 5)


def short_rewards(m: dict[str, Tensor]) -> None:
    m["rewards"] = m["rewards"][:-1]


def doubles(m: dict[str, Tensor]) -> None:
    m["rewards"] = m["rewards"].double()


def cut_elsewhere(m: dict[str, Tensor]) -> None:
    m["cut_at"] = torch.tensor([[3, 1]], dtype=torch.int32)


def cut_beyond(m: dict[str, Tensor]) -> None:
    m["cut_at"] = torch.tensor([[99, 0]], dtype=torch.int32)


def third_action(m: dict[str, Tensor]) -> None:
    m["actions"] = m["actions"] + 2


def no_rewards(m: dict[str, Tensor]) -> None:
    del m["rewards"]


def rewards_without_end(m: dict[str, Tensor]) -> None:
    m["rewards"][4, 1] = float("nan")


def flags_of_fewer_steps(m: dict[str, Tensor]) -> None:
    m["flags"] = m["flags"][:1]


def flags_with_an_axis_more(m: dict[str, Tensor]) -> None:
    m["flags"] = m["flags"][..., None].expand(-1, -1, 2).contiguous()


def log_probabilities_with_an_axis_more(m: dict[str, Tensor]) -> None:
    m["log_probabilities"] = m["log_probabilities"][..., None].contiguous()


def hidden_of_more_columns(m: dict[str, Tensor]) -> None:
    m["hidden"] = torch.zeros(3, 5)


def hidden_without_end(m: dict[str, Tensor]) -> None:
    m["hidden"][1, 2] = float("inf")


def narrow_scale(m: dict[str, Tensor]) -> None:
    m["scale"] = m["scale"][:, :3].contiguous()


def return_without_end(m: dict[str, Tensor]) -> None:
    text = m[ABOUT].numpy().tobytes().replace(b"[1.5]", b"[1" + 400 * b"0" + b"]")
    m[ABOUT] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def both_flags(m: dict[str, Tensor]) -> None:
    m["flags"][2, 1] = 3


@pytest.mark.parametrize(
    "spoil",
    [
        wrong_version, another_kind, negative_sequence, wide_observations, short_rewards, doubles,
        cut_elsewhere, cut_beyond, third_action, no_rewards, rewards_without_end, both_flags,
        flags_of_fewer_steps, flags_with_an_axis_more, log_probabilities_with_an_axis_more,
        hidden_of_more_columns, hidden_without_end, narrow_scale, return_without_end,
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(spoil: Callable[[dict[str, Tensor]], None]) -> None:
    message = encode_trajectory(full())
    spec = dataclasses.replace(SPEC, state=(3,))
    decode_trajectory(message, spec)  # as it is, it fits
    spoil(message)
    with pytest.raises(DataError):
        decode_trajectory(message, spec)


def test_a_number_that_is_not_finite_is_named_with_its_step() -> None:
    message = encode_trajectory(full())
    rewards_without_end(message)
    with pytest.raises(DataError, match=r"policy light, actor w1, trajectory 7, step 4, column 1"):
        decode_trajectory(message, None)


def test_what_is_no_message_at_all_is_refused() -> None:
    for thing in (b"", {"a": torch.ones(1)}, [1, 2], {ABOUT: torch.ones(3, dtype=torch.uint8)}):
        with pytest.raises(DataError):
            decode_trajectory(thing, None)  # type: ignore[arg-type]
        with pytest.raises(DataError):
            decode_snapshot(thing)


def test_a_snapshot_comes_back_and_shares_nothing() -> None:
    weights = {"a.weight": torch.randn(3, 2), "version": torch.tensor(5)}
    message = encode_snapshot(weights)
    before = weights["a.weight"].clone()
    weights["a.weight"].zero_()
    got = decode_snapshot(over_the_wire(message))
    assert set(got) == {"a.weight", "version"}
    assert torch.equal(got["a.weight"], before)
    assert int(got["version"]) == 5
