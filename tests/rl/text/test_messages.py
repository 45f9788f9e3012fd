"""Completions on their way: small, exact, and not believed before they were looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atoll.errors import DataError
from atoll.queues.serialization import encode, size
from atoll.rl.channel.messages import with_metadata
from atoll.rl.environments.spaces import Actions, TaskSpec
from atoll.rl.text.episodes import Episodes, decode_episodes, encode_episodes
from tests.rl.text.small import episodes, gpt

SPEC = TaskSpec(
    policy="one", task="text:brackets", observation=(32,),
    actions=Actions(kind="discrete", sizes=(256,)), gamma=1.0,
)  # fmt: skip


def sent() -> Episodes:
    found = episodes(gpt(1), gpt(2))
    found.policy_version, found.value_version, found.sequence = 3, 4, 5
    return found


def test_what_arrives_is_what_was_sent() -> None:
    before = sent()
    after = decode_episodes(encode_episodes(before), SPEC)
    for name in ("policy", "actor", "sequence", "policy_version", "value_version"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("tokens", "prompts", "lengths", "log_probabilities", "rewards", "scores"):
        ours, theirs = getattr(after, name), getattr(before, name)
        if name in ("log_probabilities", "rewards"):
            theirs = theirs * before.mask
        assert torch.equal(ours, theirs), name


def test_a_written_token_costs_about_nine_bytes() -> None:
    before = sent()
    tokens = int(before.lengths.sum())
    nbytes = size(encode(encode_episodes(before)))
    fixed = size(encode(encode_episodes(_shorter(before))))
    assert (nbytes - fixed) / (tokens - len(before.lengths)) == pytest.approx(9.0, abs=0.5)


def _shorter(whole: Episodes) -> Episodes:
    """Return it with one written token for each prompt."""
    found = decode_episodes(encode_episodes(whole), None)
    found.lengths = torch.ones_like(found.lengths)
    found.log_probabilities = found.log_probabilities[:, :1]
    found.rewards = found.rewards[:, :1]
    return found


def change(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(message: dict[str, Tensor]) -> None:
        message[name] = how(message[name])

    return apply


@pytest.mark.parametrize(
    "spoil",
    [
        change("tokens", lambda t: t[:-1]),
        change("tokens", lambda t: t.float()),
        change("lengths", lambda t: t * 0),
        change("lengths", lambda t: t * -1),
        change("lengths", lambda t: t + 2**30),
        change("prompts", lambda t: t[:, None]),
        change("prompts", lambda t: t[:0]),
        change("rewards", lambda t: t[1:]),
        change("scores", lambda t: t[1:]),
        change("log_probabilities", lambda t: t / 0),
        change("scores", lambda t: t * float("nan")),
        lambda message: message.pop("scores"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_sender(
    spoil: Callable[[dict[str, Tensor]], None],
) -> None:
    message = encode_episodes(sent())
    spoil(message)
    with pytest.raises(DataError, match="policy one, actor w1, batch 5"):
        decode_episodes(message, SPEC)


def test_texts_that_do_not_fit_the_announced_model_are_refused() -> None:
    message = encode_episodes(sent())
    small = TaskSpec(
        policy="one", task="x", observation=(4,), gamma=1.0,
        actions=Actions(kind="discrete", sizes=(256,)),
    )  # fmt: skip
    with pytest.raises(DataError, match="at most 4 tokens"):
        decode_episodes(message, small)


def test_other_messages_are_refused() -> None:
    with pytest.raises(DataError, match="snapshot"):
        decode_episodes(with_metadata({}, "snapshot"), SPEC)
    with pytest.raises(DataError, match="lack their policy or actor"):
        decode_episodes(with_metadata({}, "episodes", policy="one"), SPEC)
