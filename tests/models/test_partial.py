"""Parts of models have the values, and use up the random numbers, of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from atoll.models import build_model
from atoll.models.partial import NotPartly, Survey, build_partly, tensors_of
from atoll.models.partial import build as partial_build
from atoll.strategies.inner.pipeline.stages import chain_of

SMALL = {"layers": 3, "width": 64, "tie": False}
THEIRS = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}


def own_layers() -> nn.Module:
    """Return a model whose code draws, copies and looks at values."""
    rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
    model: Any = nn.Sequential(
        nn.Linear(64, 64),
        nn.Dropout(rates[1]),
        nn.TransformerEncoderLayer(64, 4, batch_first=True),
        nn.LSTM(64, 64),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2),
        nn.Linear(64, 64),
        nn.Linear(64, 10),
    )
    with torch.no_grad():
        nn.init.orthogonal_(model[0].weight)
        nn.init.trunc_normal_(model[2].linear1.weight, std=0.02, a=-0.03, b=0.03)
        model[5].weight.copy_(0.3 * torch.randn(64, 64))
        model[6].weight.bernoulli_(0.3)
    return cast(nn.Module, model)


def makes(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return build_model(name, **options) if name else own_layers()

    return make


CASES = {
    "gpt": makes("gpt", **SMALL), "gpt2": makes("gpt2", **SMALL),
    "llama": makes("llama", **SMALL), "resnet": makes("resnet"), "vit": makes("vit"),
    "own": makes(""),
    "hf llama": makes("transformers", context=64, config={"model_type": "llama", **THEIRS}),
    "hf qwen2": makes("transformers", context=64, config={"model_type": "qwen2", **THEIRS}),
    "hf gpt2": makes("transformers", context=64, config=GPT2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("least", [64, 1 << 13])
@pytest.mark.every(4)
def test_every_unit_is_bitwise_that_of_the_whole(
    name: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_build, "LARGE_BYTES", least)
    make = CASES[name]
    whole = make()
    after = torch.random.get_rng_state()
    for number, unit in enumerate(chain_of(whole)[0]):

        def wanted(model: nn.Module, number: int = number) -> Iterator[torch.Tensor]:
            return tensors_of([chain_of(model)[0][number]])

        found = build_partly(make, wanted)
        assert not found.whole
        assert torch.equal(torch.random.get_rng_state(), after)
        own, expected = chain_of(found.model)[0][number], unit.state_dict()
        assert own.state_dict().keys() == expected.keys()
        for key, value in own.state_dict().items():
            assert torch.equal(value, expected[key]), key
        for buffer, value in zip(own.buffers(), unit.buffers(), strict=True):
            assert torch.equal(buffer, value)


def test_only_wanted_tensors_get_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_build, "LARGE_BYTES", 1 << 12)
    make = CASES["llama"]
    found = build_partly(make, lambda model: tensors_of([model.blocks[1]])).model
    large = {n: p for n, p in found.named_parameters() if p.nbytes >= 1 << 12}
    assert all(p.is_meta != n.startswith("blocks.1.") for n, p in large.items())
    survey = Survey.of(make)
    own = sum(p.nbytes for n, p in large.items() if n.startswith("blocks.1."))
    largest = max(p.nbytes for p in large.values())
    tables = sum(b.nbytes for b in found.blocks[1].buffers())
    peak = survey.peak_bytes(tensors_of([survey.model.blocks[1]]))
    assert own + largest <= peak <= own + largest + tables


class Odd(nn.Module):
    """Its small parameter follows from a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(256, 256)
        self.small = nn.Parameter(torch.zeros(4))
        with torch.no_grad():
            self.small.copy_(self.large.weight[:4, 0])


def test_what_cannot_be_built_in_parts_is_built_whole(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Odd:
        torch.manual_seed(1)
        return Odd()

    found = build_partly(make, lambda model: tensors_of([model.large]))
    assert "a small tensor is filled from a large one" in found.whole
    assert found.whole in caplog.text
    assert torch.equal(found.model.small, make().small)

    def wanted(model: nn.Module) -> Any:
        raise NotPartly("it is not to be")

    assert build_partly(CASES["gpt"], wanted).whole == "it is not to be"


def test_an_error_of_the_models_own_code_is_raised_as_it_is() -> None:
    def make() -> nn.Module:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        build_partly(make, lambda model: [])
