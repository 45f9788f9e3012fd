"""Policies share completions as text (SAPO): what travels, what is learned from, whole jobs."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.errors import ConfigError
from atoll.queues import InMemoryChannel
from atoll.queues.queue import INLINE_BYTES
from atoll.queues.serialization import MAGIC
from atoll.rl.text.actor import SHARED
from atoll.rl.text.compatibility import check_text
from atoll.rl.text.in_process import TextInProcessRun
from atoll.rl.text.language_policy import LanguagePolicy
from atoll.rl.text.run import run_text_job
from atoll.rl.text.sharing import Exchange
from atoll.rl.text.start import StartModel, start_model, train_start_model
from atoll.rl.text.tasks import Sums
from tests.rl.text.small import WORDING, gpt, job, rl_table
from tests.rl.text.test_run import member, run_all

TASK = "text:brackets"


def shared_table(share: int = 2, **changes: Any) -> RlTable:
    names = ("one", "two", "three")
    policies = [
        PolicyTable(name=name, env=TASK, options={"kinds": "()", "most": 3}) for name in names
    ]
    return rl_table(algorithm="grpo", share=share, policies=policies, **changes)


@pytest.fixture(scope="module")
def beginning() -> StartModel:
    """Return a tiny model that ends what it writes."""
    spec = job(shared_table(), steps=60)
    found = start_model(spec)
    train_start_model(found, spec)
    return found


class Half:
    """A task that half of all completions solve."""

    def prompt(self, source: Any) -> str:
        return "(" * int(source.randint(1, 3))

    def reward(self, prompt: str, completion: str) -> float:
        return float(len(completion) % 2)

    def example(self, source: Any) -> tuple[str, str]:
        return "(", ")"


class Never(Half):
    """A task that none solves."""

    def reward(self, prompt: str, completion: str) -> float:
        return 0.0


def policy(name: str, model: Any, *, task: Any = None, share: int = 2) -> LanguagePolicy:
    return LanguagePolicy(
        name, task or Half(), copy.deepcopy(model), WORDING, shared_table(share), episodes=999,
        seed=3,
    )  # fmt: skip


def in_order(tokens: Tensor, scores: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return completions sorted by their tokens: which group is first, is drawn."""
    order = sorted(range(len(tokens)), key=lambda row: tokens[row].tolist())
    return tokens[order], scores[order], log_p[order]


def test_a_clones_completions_are_read_as_its_own(beginning: StartModel) -> None:
    writer, reader = policy("one", beginning.model), policy("two", beginning.model)
    own, theirs = reader.write(), writer.write()
    sender, receiver = Exchange(writer, task="t", seed=3), Exchange(reader, task="t", seed=3)
    receiver.take(sender.message(theirs))
    together = receiver.with_others(own)
    extra = together.steps - own.steps
    assert (own.steps, extra) == (8, 8), "two groups of four each"
    assert torch.equal(together.scores[:8], own.scores)
    length, steps = theirs.tokens.shape[1], theirs.log_probabilities.shape[1]
    read = in_order(
        together.tokens[8:, :length], together.scores[8:], together.log_probabilities[8:, :steps]
    )
    written = in_order(theirs.tokens, theirs.scores, theirs.log_probabilities)
    assert torch.equal(read[0], written[0])
    assert torch.equal(read[1], written[1])
    torch.testing.assert_close(read[2], written[2], rtol=0, atol=1e-4)  # the ratio begins at 1
    facts = reader.improve(together, None)
    assert abs(facts["kl"]) < 1e-6
    assert receiver.with_others(own) is own, "a group is learned from once"


def test_groups_of_equal_rewards_never_enter(beginning: StartModel) -> None:
    writer = policy("one", beginning.model)
    reader = policy("two", beginning.model, task=Never())
    receiver = Exchange(reader, task="t", seed=3)
    receiver.take(Exchange(writer, task="t", seed=3).message(writer.write()))
    own = reader.write()
    assert receiver.with_others(own) is own
    assert receiver.dropped == {"equal": 2}


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    model = gpt(2)
    writer, reader = policy("one", model), policy("two", model)  # they write no text in UTF-8
    message = Exchange(writer, task="t", seed=3).message(writer.write())
    receiver = Exchange(reader, task="t", seed=3)
    group = message["groups"][0]
    short = group | {"completions": group["completions"][:3]}
    for wrong in (7, {}, message | {"groups": [{"prompt": 3}]}, message | {"groups": [short]}):
        receiver.take(wrong)
    assert receiver.dropped == {"damaged": 4}
    for prompt, text in (
        ("", "a"),
        ("a\nb", "a"),
        ("(" * 40, "a"),
        ("(", "a" * 40),
        ("(", "\ud800"),
    ):
        other = group | {"prompt": prompt, "completions": [text] * 4}
        receiver.take(message | {"groups": [other]})
    assert receiver.dropped == {"damaged": 5, "long": 4}
    own = reader.write()
    strange = policy("three", model, task=Sums())
    unable = Exchange(strange, task="t", seed=3)
    no_sum = {"prompt": "no sum", "completions": ["3"] * 4, "ended": [True] * 4}
    unable.take(message | {"groups": [no_sum]})
    assert unable.dropped == {"damaged": 1}, "its reward raised ValueError"
    receiver.take(message | {"task": "another"})
    receiver.take(message | {"policy": "two"})
    assert receiver.with_others(own) is own


def test_a_whole_run_shares_and_can_be_repeated(beginning: StartModel) -> None:
    spec = job(shared_table(steps=3 * 16))
    runs = [TextInProcessRun(spec, beginning) for _ in range(2)]
    sizes: list[int] = []
    for together in runs:
        while not together.done:
            together.update(on_update=lambda name, facts: sizes.append(round(facts["length"])))
    assert len(sizes) == 2 * 3 * 3
    for ours, theirs in zip(runs[0].policies, runs[1].policies, strict=True):
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name]), name
    alone = TextInProcessRun(job(shared_table(0, steps=3 * 16)), beginning)
    alone.update()
    with torch.no_grad():
        pairs = zip(alone.policies[0].model.parameters(), runs[0].policies[0].model.parameters(),
                    strict=True)  # fmt: skip
        assert not all(torch.equal(a, b) for a, b in pairs)


def test_members_share_through_a_topic(tmp_path: Path) -> None:
    results = run_all(job(shared_table(), steps=60), tmp_path)
    assert [one["updates"] for one in results] == [4, 4, 4]
    assert [one["episodes"] for one in results] == [32, 32, 32], "half of each batch is its own"


def test_a_policy_alone_continues_and_reports_unreadable_groups(tmp_path: Path) -> None:
    spec, channel = job(shared_table(steps=2 * 16), steps=20), InMemoryChannel()
    other = member(1, spec, channel, tmp_path)
    topic = other.topic(SHARED, max_items=12)
    topic.publish({"policy": "two", "groups": 7})
    topic.publish({"policy": "two", "groups": "x" * INLINE_BYTES})
    (stored,) = channel._blobs
    channel._blobs[stored] = MAGIC + b"j{"
    found = run_text_job(spec, member(0, spec, channel, tmp_path))
    assert (found["updates"], found["episodes"]) == (2, 16)
    assert found["dropped"] == {"shared_damaged": 1, "shared_lost": 1}


def test_who_cannot_share_is_refused() -> None:
    check_text(job(shared_table()))
    for changes, why in (
        ({"algorithm": "ppo"}, "share completions that they write themselves"),
        ({"share": 4}, "has to write a part of each batch itself"),
        ({"policies": shared_table().policies[:1]}, "no other to share with"),
    ):
        table = dataclasses.replace(shared_table(), **changes)
        with pytest.raises(ConfigError, match=why):
            check_text(job(table))
