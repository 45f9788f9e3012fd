"""A whole job in one process: it learns what its task rewards, and the same every time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.checkpoint import save_weights
from atoll.checkpoint.format.weights import describe
from atoll.config import JobSpec
from atoll.config.rl_tables import PolicyTable
from atoll.errors import ConfigError
from atoll.models import GPT
from atoll.rl.text.in_process import TextInProcessRun
from atoll.rl.text.start import StartModel, start_model, train_start_model
from tests.rl.text.small import WORDING, gpt, job, rl_table

POLICIES = [
    PolicyTable(name="one", env="text:brackets", options={"kinds": "()", "most": 3}),
    PolicyTable(name="two", env="text:expressions", options={"most": 2}),
]


def small_job(**changes: Any) -> JobSpec:
    settings: dict[str, Any] = {
        "policies": POLICIES, "environments": 16, "group": 4, "steps": 12 * 64, "epochs": 2,
        "minibatches": 2, "lr": 2e-3, "critic_lr": 2e-3, "kl": 0.02,
    }  # fmt: skip
    return job(rl_table(**settings | changes), steps=150)


@pytest.fixture(scope="module")
def beginning() -> StartModel:
    """Return what a short supervised phase makes of a tiny model."""
    found = start_model(small_job())
    train_start_model(found, small_job())
    return found


@pytest.mark.parametrize("changes", [{"critic": "pooled"}, {"algorithm": "grpo"}])
@pytest.mark.every(2)
def test_rewards_teach_what_examples_did_not(
    beginning: StartModel, changes: dict[str, Any]
) -> None:
    together = TextInProcessRun(small_job(**changes), beginning)
    before = [policy.examine(128, temperature=1.0)[0] for policy in together.policies]
    while not together.done:
        together.update()
    after = [policy.examine(128, temperature=1.0)[0] for policy in together.policies]
    assert all(score < 0.75 for score in before), before  # half of the examples are wrong
    assert all(new > old + 0.15 for old, new in zip(before, after, strict=True)), (before, after)


def test_own_critics_are_one_for_each_policy(beginning: StartModel) -> None:
    together = TextInProcessRun(small_job(critic="own", steps=64), beginning)
    together.update()
    assert [critic.policies for critic in together.critics] == [("one",), ("two",)]
    assert [critic.version for critic in together.critics] == [1, 1]


def test_heavier_penalty_keeps_policies_near_reference(beginning: StartModel) -> None:
    away = []
    for kl in (0.0, 5.0):
        together = TextInProcessRun(small_job(kl=kl, steps=192), beginning)
        while not together.done:
            together.update()
        policy = together.policies[0]
        written = policy.write()
        apart = (written.log_probabilities - policy.referred(written)) * written.mask
        away.append(apart.sum().item())
    assert away[1] < away[0]


def test_same_seed_or_saved_state_is_bit_identical(
    beginning: StartModel,
) -> None:
    spec = small_job(steps=3 * 64)
    one, again, resumed = (TextInProcessRun(spec, beginning) for _ in range(3))
    for _ in range(2):
        one.update()
        again.update()
    for old, new in zip(one.policies, resumed.policies, strict=True):
        new.load_state_dict(old.state_dict())
    resumed.critics[0].load_state_dict(one.critics[0].state_dict())
    for together in (one, again, resumed):
        together.update()
        assert together.done
    for other in (again, resumed):
        for ours, theirs in zip(one.policies, other.policies, strict=True):
            for name, tensor in ours.state_dict().items():
                assert torch.equal(tensor, theirs.state_dict()[name]), name


def test_examples_teach_the_same_from_the_same_seed() -> None:
    spec = small_job()
    spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, steps=3))
    found = [start_model(spec) for _ in range(2)]
    losses = [train_start_model(one, spec) for one in found]
    assert losses[0] == losses[1]
    for ours, theirs in zip(found[0].model.parameters(), found[1].model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_weights_of_another_job_are_where_it_starts(tmp_path: Path) -> None:
    model = gpt(8)
    path = tmp_path / "model.safetensors"
    about = describe(
        "gpt", options=dataclasses.asdict(model.config), tokenizer=WORDING.tokenizer.to_json()
    )
    save_weights(path, model.state_dict(), about=about)
    found = start_model(small_job(start=str(path)))
    assert found.trained
    assert isinstance(found.model, GPT)
    assert torch.equal(found.model.embedding.weight, model.embedding.weight)


def test_prompts_need_room_beside_completions(beginning: StartModel) -> None:
    with pytest.raises(ConfigError, match="context = 24, max_tokens = 24"):
        TextInProcessRun(small_job(max_tokens=24), beginning)
