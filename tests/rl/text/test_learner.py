"""Updates of PPO and GRPO against loops over single tokens, written down a second time here."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from atoll.config.rl_tables import RlTable
from atoll.errors import LossNotFinite
from atoll.models import GPT
from atoll.rl.text.episodes import Episodes
from atoll.rl.text.learner import TokenLearner, token_weights
from atoll.rl.text.sampler import log_probabilities
from tests.rl.text.small import episodes, gpt, rl_table


def reference_loss(
    model: GPT, batch: Episodes, advantages: torch.Tensor, refer: torch.Tensor, rl: RlTable
) -> torch.Tensor:
    """Return the loss by its definition, token by token, each text by itself."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = sum(batch.lengths.tolist())
    for row, (start, length) in enumerate(
        zip(batch.prompts.tolist(), batch.lengths.tolist(), strict=True)
    ):
        text = batch.tokens[row, : start + length]
        logits = model(text[None])[0] / rl.temperature
        for t in range(length):
            log_p = logits[start + t - 1].log_softmax(0)
            now = log_p[int(text[start + t])]
            ratio = torch.exp(now - batch.log_probabilities[row, t].double())
            gain = advantages[row, t].double()
            gained = ratio.item()
            if (gain > 0 and gained > 1 + rl.clip) or (gain < 0 and gained < 1 - rl.clip):
                surrogate = gain * (1 + rl.clip if gain > 0 else 1 - rl.clip)
            else:
                surrogate = ratio * gain
            loss = -surrogate - rl.entropy * -(log_p.exp() * log_p).sum()
            if rl.algorithm == "grpo":
                x = refer[row, t].double() - now
                loss = loss + rl.kl * (torch.exp(x) - 1 - x)
                total = total + loss / length / len(batch.tokens)
            else:
                total = total + loss / tokens
    return total


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_loss_and_gradient_are_those_of_the_definition(algorithm: str, temperature: float) -> None:
    rl = rl_table(algorithm=algorithm, entropy=0.01, temperature=temperature, max_norm=1e9, lr=1e-3)
    writer, reference = gpt(1).double(), gpt(2).double()
    batch = episodes(gpt(1), gpt(2), temperature=temperature)
    with torch.no_grad():  # the policy has moved since it wrote: some ratios are clipped
        for parameter in writer.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)), alpha=0.03
            )
        refer, _ = log_probabilities(
            reference, batch.tokens, batch.places, batch.written, temperature=temperature
        )
    batch.log_probabilities = batch.log_probabilities.double()
    advantages = torch.randn(
        batch.rewards.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    twin = copy.deepcopy(writer)
    expected = reference_loss(twin, batch, advantages, refer, rl)
    expected.backward()  # type: ignore[no-untyped-call]
    stats = TokenLearner(writer, rl, updates=10).improve(batch, advantages, refer, generator=None)
    assert stats["policy_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert 0 < stats["clip_fraction"] < 1
    for ours, theirs in zip(writer.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def test_weights_sum_to_one_over_tokens_or_over_completions() -> None:
    mask = torch.tensor([[True, False, False], [True, True, True]])
    by_token = token_weights(mask, per_completion=False)
    assert by_token.tolist() == [[0.25, 0, 0], [0.25, 0.25, 0.25]]
    by_text = token_weights(mask, per_completion=True)
    torch.testing.assert_close(by_text.sum(1), torch.tensor([0.5, 0.5]))


def test_likelier_after_praise_and_less_likely_after_blame() -> None:
    model = gpt(1)
    batch = episodes(model, model, count=2)
    advantages = torch.tensor([[1.0], [-1.0]]) * batch.mask
    before = (batch.log_probabilities * batch.mask).sum(1)
    learner = TokenLearner(model, rl_table(epochs=5, lr=1e-3, anneal=False), updates=1)
    learner.improve(batch, advantages, batch.log_probabilities, generator=None)
    now, _ = log_probabilities(model, batch.tokens, batch.places, batch.written, temperature=1.0)
    change = (now.detach() * batch.mask).sum(1) - before
    assert change[0] > 0
    assert change[1] < 0


def test_passes_end_early_beyond_the_divergence() -> None:
    model = gpt(1)
    batch = episodes(model, model)
    advantages = torch.randn(batch.rewards.shape)
    learner = TokenLearner(model, rl_table(epochs=50, lr=3e-2, target_kl=0.05), updates=2)
    stats = learner.improve(batch, advantages, batch.log_probabilities, generator=None)
    assert stats["passes"] < 50


def test_a_state_goes_on_exactly_and_the_rate_falls() -> None:
    rl, batch = rl_table(epochs=2, minibatches=2), episodes(gpt(1), gpt(1))
    advantages = torch.randn(batch.rewards.shape, generator=torch.Generator().manual_seed(1))

    def update(learner: TokenLearner) -> None:
        order = torch.Generator().manual_seed(learner.version)
        learner.improve(batch, advantages, batch.log_probabilities, generator=order)

    whole = gpt(1)
    learner = TokenLearner(whole, rl, updates=4)
    for _ in range(2):
        update(learner)
    state, weights = learner.state_dict(), copy.deepcopy(whole.state_dict())
    update(learner)
    resumed = gpt(5)
    resumed.load_state_dict(weights)
    again = TokenLearner(resumed, rl, updates=4)
    again.load_state_dict(state)
    update(again)
    for ours, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert again.version == 3


def test_a_loss_that_is_no_number_is_reported_with_the_policy() -> None:
    model = gpt(1)
    batch = episodes(model, model)
    with pytest.raises(LossNotFinite, match="policy one, update 1"):
        TokenLearner(model, rl_table(), updates=1).improve(
            batch, torch.full(batch.rewards.shape, math.inf), batch.log_probabilities,
            generator=None,
        )  # fmt: skip
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
