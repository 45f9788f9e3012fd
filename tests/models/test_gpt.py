import math
from typing import Any

import pytest
import torch

from atoll.errors import ConfigError
from atoll.models import GPT, GPTConfig, build_model


def small(**options: int | float | bool) -> GPT:
    torch.manual_seed(3)
    sizes = {"vocab_size": 11, "layers": 2, "width": 16, "heads": 2, "context": 8} | options
    return GPT(GPTConfig(**sizes))  # type: ignore[arg-type]


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(5))


def stirred(model: GPT) -> GPT:
    """The model with random weights everywhere: fresh blocks add nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def test_logits_have_a_value_per_token_and_vocabulary_entry() -> None:
    assert small()(tokens(3, 8)).shape == (3, 8, 11)
    assert small()(tokens(3, 2)).shape == (3, 2, 11)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, ids = stirred(small()), tokens(2, 8)
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(ids), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def test_order_of_earlier_tokens_matters() -> None:
    model = stirred(small())
    ids = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model(ids)[:, -1], model(swapped)[:, -1], atol=1e-3)


def test_fresh_model_knows_nothing() -> None:
    loss = small().loss(tokens(16, 8), tokens(16, 8).flip(0))
    assert loss.item() == pytest.approx(math.log(11), rel=0.05)


def test_loss_is_the_mean_of_the_negative_log_likelihood() -> None:
    model, ids, targets = stirred(small()), tokens(2, 4), tokens(2, 4).flip(0)
    chances = model(ids).softmax(dim=-1).gather(-1, targets[..., None])
    assert model.loss(ids, targets).item() == pytest.approx(-chances.log().mean().item(), rel=1e-5)


def test_same_seed_gives_same_weights() -> None:
    one, other = small().state_dict(), small().state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_tied_output_layer_is_the_embedding() -> None:
    tied, untied = small(), small(tie=False)
    assert tied.head.weight is tied.embedding.weight
    assert untied.num_parameters - tied.num_parameters == 11 * 16


def test_default_size_is_what_the_documentation_says() -> None:
    assert GPT(GPTConfig()).num_parameters == 115_008
    assert "115,008" in (GPTConfig.__doc__ or "")


def test_flops_count_every_matrix_six_times() -> None:
    model = small()
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2) + 11 * 16
    assert model.flops_per_token == 6 * matrices + 6 * 2 * 8 * 16


def test_training_on_one_batch_learns_it() -> None:
    model, ids = small(), tokens(4, 9)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < 0.3


def test_weights_survive_a_round_trip_into_another_model() -> None:
    model = stirred(small())
    other = small()
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens(2, 8)), other(tokens(2, 8)))
    assert set(model.state_dict()) >= {name for name, _ in model.named_parameters()}


def test_dropout_acts_in_training_only() -> None:
    model = stirred(small(dropout=0.5))
    ids = tokens(2, 8)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


class TestGenerate:
    def test_text_starts_with_the_prompt_and_may_outgrow_the_context(self) -> None:
        prompt = tokens(2, 3)
        out = small().generate(prompt, tokens=20, generator=torch.Generator().manual_seed(0))
        assert out.shape == (2, 23)
        assert torch.equal(out[:, :3], prompt)

    def test_same_generator_gives_the_same_text(self) -> None:
        model, prompt = stirred(small()), tokens(1, 3)
        outs = [
            model.generate(prompt, tokens=12, generator=torch.Generator().manual_seed(9))
            for _ in range(2)
        ]
        assert torch.equal(*outs)

    def test_zero_temperature_and_top_one_both_take_the_likeliest(self) -> None:
        model, prompt = stirred(small()), tokens(2, 3)
        greedy = model.generate(prompt, tokens=6, temperature=0.0)
        assert torch.equal(greedy, model.generate(prompt, tokens=6, top_k=1))
        assert torch.equal(greedy[:, 3], model(prompt)[:, -1].argmax(-1))

    def test_model_goes_on_training_afterwards(self) -> None:
        model = small()
        model.generate(tokens(1, 1), tokens=1)
        assert model.training

    def test_model_goes_on_training_after_an_error(self) -> None:
        model = small()
        with pytest.raises(IndexError):
            model.generate(torch.tensor([[11]]), tokens=1)  # no such token
        assert model.training

    def test_empty_prompt_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="nothing to continue"):
            small().generate(torch.empty(1, 0, dtype=torch.int64), tokens=3)

    @pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": 0}, {"tokens": -1}])
    def test_negative_settings_are_refused(self, options: dict[str, float]) -> None:
        with pytest.raises(ConfigError, match="cannot generate"):
            small().generate(tokens(1, 1), **({"tokens": 2} | options))  # type: ignore[arg-type]


def test_too_long_a_sequence_names_both_lengths() -> None:
    with pytest.raises(ConfigError, match=r"given: 9 tokens; expected: at most 8"):
        small()(tokens(1, 9))


def test_width_that_heads_cannot_share_names_one_that_they_can() -> None:
    with pytest.raises(ConfigError, match=r"try width=72"):
        GPTConfig(width=65, heads=6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers is too small"),
        ({"dropout": 1.0}, "dropout is out of range"),
        ({"embedding_std": 0.0}, "embedding_std is out of range"),
        ({"embedding_std": math.inf}, "embedding_std is out of range"),
    ],
)
def test_sizes_without_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**options)


class TestTable:
    def test_options_reach_the_model(self) -> None:
        model = build_model("gpt", layers=1, width=8, heads=2, dropout=0)
        assert isinstance(model, GPT)
        assert model.config == GPTConfig(layers=1, width=8, heads=2, dropout=0)

    def test_unknown_model_names_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown model.*'gptt'.*did you mean 'gpt'"):
            build_model("gptt")

    def test_unknown_option_names_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match=r"'layer'.*did you mean 'layers'"):
            build_model("gpt", layer=3)

    @pytest.mark.parametrize("value", ["2", 2.0, True])
    def test_option_of_the_wrong_kind_is_refused(self, value: object) -> None:
        with pytest.raises(ConfigError, match=r"'layers'.*wrong kind.*expected: int"):
            build_model("gpt", layers=value)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_only_the_embedding_starts_larger(name: str) -> None:
    built = []
    for std in (0.02, 0.4):
        torch.manual_seed(3)
        sizes = {"layers": 1, "width": 16, "heads": 2, "tie": False}
        built.append(dict(build_model(name, embedding_std=std, **sizes).named_parameters()))
    small, large = built
    torch.testing.assert_close(large.pop("embedding.weight"), 20 * small.pop("embedding.weight"))
    assert all(torch.equal(large[key], value) for key, value in small.items())
