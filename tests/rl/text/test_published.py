"""GRPO and PPO on a model of `transformers` with adapters: only they learn, and are kept."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config import JobSpec, read_spec
from atoll.errors import ConfigError
from atoll.models import build_model
from atoll.models.adapted import TunedLM
from atoll.rl.channel.versions import sampling_weights
from atoll.rl.text import start
from atoll.rl.text.compatibility import check_text
from atoll.rl.text.critic import ValueModel
from atoll.rl.text.in_process import TextInProcessRun
from atoll.rl.text.sampler import hidden_states, log_probabilities, write
from atoll.rl.text.start import StartModel, start_model
from atoll.rl.text.trained import trained_tensors
from tests.models.tiny import save_tiny
from tests.rl.text.test_run import run_all

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
pytest.importorskip("peft", reason="pip install 'atoll[tune]'")


class Ending:
    """Reward: that the completion ends, which is worth something without reading it."""

    def prompt(self, source: random.Random) -> str:
        return source.choice(["the user", "the assistant", "count apples"])

    def reward(self, prompt: str, completion: str) -> float:
        return 1.0

    def example(self, source: random.Random) -> tuple[str, str]:
        return self.prompt(source), ""


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose output is not nearly uniform, so that adapters can move it."""
    import transformers

    folder = save_tiny(tmp_path_factory.mktemp("pretrained"))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    model.save_pretrained(folder)
    return folder


def spec_of(pretrained: Path, **rl: Any) -> JobSpec:
    return read_spec(
        {
            "job": {"seed": 5},
            "model": {
                "name": "transformers", "source": str(pretrained), "context": 48,
                "adapter": {"method": "lora", "rank": 8},
            },
            "rl": {
                "algorithm": "grpo", "environments": 4, "group": 16, "max_tokens": 12,
                "steps": 64 * 25, "lr": 0.02, "kl": 0.0, "anneal": False, "epochs": 1,
                "policies": [{"name": "p", "env": "text:tests.rl.text.test_published:Ending"}],
                **rl,
            },
        }
    )  # fmt: skip


@pytest.fixture
def beginning(pretrained: Path) -> StartModel:
    return start_model(spec_of(pretrained))


def test_only_adapters_travel_to_rollout_workers(pretrained: Path, beginning: StartModel) -> None:
    trainer, worker = beginning.model, start_model(spec_of(pretrained)).model
    learned = trained_tensors(trainer)
    with torch.no_grad():
        for tensor in learned.values():
            tensor.add_(torch.randn_like(tensor))
    sent = sampling_weights(trainer, only=learned)
    whole = sum(tensor.nbytes for tensor in trainer.state_dict().values())
    assert sum(tensor.nbytes for tensor in sent.values()) < 0.2 * whole
    worker.load_state_dict(sent, strict=False)
    received = trained_tensors(worker)
    assert received.keys() == learned.keys()
    for name, tensor in learned.items():
        assert torch.equal(received[name], tensor.bfloat16().to(tensor.dtype)), name


def test_rewards_rise_and_only_adapters_change(pretrained: Path, beginning: StartModel) -> None:
    run = TextInProcessRun(spec_of(pretrained), beginning)
    (policy,) = run.policies
    assert isinstance(policy.model, TunedLM)
    frozen = {
        name: tensor.clone()
        for name, tensor in policy.model.state_dict().items() if "lora_" not in name
    }  # fmt: skip
    before, _ = policy.examine(64, temperature=1.0)
    while not run.done:
        run.update()
    after, _ = policy.examine(64, temperature=1.0)
    assert after > before + 0.4
    now = policy.model.state_dict()
    assert all(torch.equal(tensor, now[name]) for name, tensor in frozen.items())
    assert all("lora_" in name for name in trained_tensors(policy.model))


def test_cached_sampling_has_the_whole_models_probabilities(
    pretrained: Path, beginning: StartModel
) -> None:
    prompts = beginning.wording.encode(["the user", "count the apples of the user"], room=30)
    written = write(
        beginning.model, prompts, ends=beginning.wording.ends, max_tokens=8, temperature=1.0,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    steps = written.log_probabilities.shape[1]
    places = (prompts.lengths[:, None] - 1 + torch.arange(steps)).clamp(
        max=written.tokens.shape[1] - 1
    )
    following = written.tokens.gather(1, (places + 1).clamp(max=written.tokens.shape[1] - 1))
    with torch.no_grad():
        whole, _ = log_probabilities(
            beginning.model, written.tokens, places, following, temperature=1.0
        )
    mask = torch.arange(steps)[None] < written.lengths[:, None]
    torch.testing.assert_close(whole[mask], written.log_probabilities[mask], rtol=1e-4, atol=1e-4)


def test_a_resumed_policy_goes_on_exactly(pretrained: Path) -> None:
    spec = spec_of(pretrained)

    def fresh() -> TextInProcessRun:
        return TextInProcessRun(spec, start_model(spec))

    whole = fresh()
    for _ in range(3):
        whole.update()
    half = fresh()
    half.update()
    state = half.policies[0].state_dict()
    assert sum(tensor.numel() for tensor in state.values()) < 3.2 * sum(
        tensor.numel() for tensor in trained_tensors(half.policies[0].model).values()
    )  # adapters and their moments, not the base
    again = fresh()
    again.policies[0].load_state_dict(state)
    for _ in range(2):
        again.update()
    for name, tensor in trained_tensors(whole.policies[0].model).items():
        assert torch.equal(tensor, trained_tensors(again.policies[0].model)[name]), name


PPO = {"algorithm": "ppo", "gamma": 1.0, "critic_lr": 0.01, "critic_epochs": 2}


def test_rewards_rise_by_ppo_with_a_value_model_of_adapters(
    pretrained: Path, beginning: StartModel
) -> None:
    run = TextInProcessRun(spec_of(pretrained, **PPO, critic="own", steps=64 * 20), beginning)
    (policy,), (critic,) = run.policies, run.critics
    base = {
        name: tensor.clone()
        for name, tensor in critic.model.state_dict().items()
        if "lora_" not in name and name.startswith("trunk.")
    }
    before, _ = policy.examine(64, temperature=1.0)
    explained = []
    while not run.done:
        run.update(on_update=lambda name, facts: explained.append(facts["explained_variance"]))
    after, _ = policy.examine(64, temperature=1.0)
    assert after > before + 0.3
    assert max(explained) > 0.2
    now = critic.model.state_dict()
    assert all(torch.equal(tensor, now[name]) for name, tensor in base.items())


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        {"model_type": "gemma", "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32},
        {"model_type": "opt", "hidden_size": 16, "num_hidden_layers": 2, "ffn_dim": 32,
         "num_attention_heads": 2, "word_embed_proj_dim": 8},
    ],
    ids=lambda config: str(config["model_type"]),
)  # fmt: skip
def test_a_value_model_reads_what_the_output_layer_reads(
    config: dict[str, Any],
) -> None:
    model: Any = build_model("transformers", context=16, config={**config, "vocab_size": 40}).eval()
    critic = ValueModel(["a", "b"], model, conditioned=True)
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = hidden_states(critic.trunk, ids)
        torch.testing.assert_close(model.library_model.lm_head(states), model(ids))
        values = critic(ids, torch.tensor([[3, 8], [4, 5]]), torch.tensor([0, 1]))
    assert values.shape == (2, 2)


def test_a_value_models_snapshot_has_no_frozen_base(pretrained: Path) -> None:
    spec = spec_of(pretrained, **PPO, critic="own")
    run = TextInProcessRun(spec, start_model(spec))
    run.update()
    episodes = run.policies[0].write()
    snapshot = run.critics[0].snapshot()
    base = sum(tensor.nbytes for tensor in start_model(spec).model.state_dict().values())
    assert sum(tensor.nbytes for tensor in snapshot.values()) < 0.2 * base
    other = TextInProcessRun(spec, start_model(spec)).critics[0]
    assert not torch.equal(other.of(episodes), run.critics[0].of(episodes))
    other.load_snapshot(snapshot)
    assert torch.equal(other.of(episodes), run.critics[0].of(episodes))
    other.load_state_dict(run.critics[0].state_dict())
    for critic in (other, run.critics[0]):
        critic.learn([episodes])
    assert torch.equal(other.of(episodes), run.critics[0].of(episodes))


def test_all_weights_of_a_value_model_learn_without_adapters(pretrained: Path) -> None:
    spec = spec_of(pretrained, **PPO, critic="own", lr=1e-3)
    options = {name: value for name, value in spec.model.options.items() if name != "adapter"}
    spec = replace(spec, model=replace(spec.model, options=options))
    run = TextInProcessRun(spec, start_model(spec))
    critic = run.critics[0]
    before = {name: tensor.clone() for name, tensor in critic.snapshot().items()}
    run.update()
    moved = {n for n, tensor in critic.snapshot().items() if not torch.equal(tensor, before[n])}
    assert sum("layers" in name for name in moved) >= 9


def test_two_published_policies_and_a_pooled_value_model(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_at_a_time = threading.Lock()  # the library does not load models in several threads

    def load(spec: JobSpec) -> StartModel:
        with one_at_a_time:
            return start_model(spec)

    monkeypatch.setattr(start, "start_model", load)
    policies = [
        {"name": name, "env": "text:tests.rl.text.test_published:Ending"} for name in ("a", "b")
    ]
    spec = spec_of(pretrained, **PPO, critic="pooled", steps=64 * 3, policies=policies)
    critic, *actors = run_all(spec, tmp_path)
    assert critic["trajectories"] == 6
    assert critic["updates"] >= 1
    assert [actor["updates"] for actor in actors] == [3, 3]


def test_another_runs_weights_are_refused(pretrained: Path) -> None:
    with pytest.raises(ConfigError, match="published weights"):
        check_text(spec_of(pretrained, start="file.safetensors"))
