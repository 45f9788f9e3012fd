"""Every model that comes along is cut into stages without change: their sum is the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.models import MODELS, build_model
from atoll.models.causal_lm import GPT2, ROTARY
from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut, cuts_of
from tests.models.test_contract import SMALL, TINY_LLAMA, some_batch
from tests.strategies.swarm.kit import Batch, means, plainly, runners, through

ROWS, COUNT = 4, 2
LAYERS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 4, "tie": False},
    "gpt2": {"layers": 4, "tie": False},
    "llama": {"layers": 4, "tie": False},
    "resnet": {"blocks": 1},
    "vit": {"layers": 4},
    "transformers": {"config": TINY_LLAMA | {"num_hidden_layers": 4, "tie_word_embeddings": False}},
}
STEADY = {
    "attention_dropout": 0.0, "residual_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "attn_pdrop": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
TINY_GPT2 = {
    "model_type": GPT2, "vocab_size": 11, "n_embd": 16, "n_layer": 4, "n_head": 2,
    "n_positions": 8, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config_of(family: str) -> dict[str, Any]:
    if family == GPT2:
        return TINY_GPT2 | STEADY
    turned = 0.5 if family == "stablelm" else 1.0  # part of a head that it rotates
    own = {"model_type": family, "num_hidden_layers": 4, "head_dim": 4}
    return TINY_LLAMA | STEADY | own | {"partial_rotary_factor": turned}


CASES = [*sorted(MODELS), *(f"transformers {family}" for family in sorted({*ROTARY, GPT2}))]


def made(case: str) -> Any:
    """Return a model of four layers with weights in which every part matters."""
    torch.manual_seed(3)
    name, _, family = case.partition(" ")
    own = {"config": config_of(family), "context": 8} if family else LAYERS[name]
    model: Any = build_model(name, **(SMALL[name] | own))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def batches_of(case: str) -> list[Batch]:
    inputs, targets = some_batch(case.partition(" ")[0], rows=ROWS * COUNT)
    return list(zip(torch.split(inputs, ROWS), torch.split(targets, ROWS), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_stages_of_every_model_are_the_whole_bitwise(case: str) -> None:
    _, expected, _ = plainly(made(case), batches_of(case), rows=ROWS)
    assert all(bool(gradient.any()) for gradient in expected.values())
    # Of transformers' models, which share our way of cutting, only the most stages.
    for stages in (4,) if "transformers " in case else (1, 2, 3, 4):
        path = runners(case, cut=StageCut(stages=stages), model=made)
        for index, batch in enumerate(batches_of(case)):
            key = MicrobatchKey(0, index)
            through(path, key, batch)
            for runner in path:
                runner.fold(key)
        same(means(path), expected)


class Branched(nn.Module):
    """Its second layer takes two tensors, so its children are no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.both = nn.Bilinear(6, 6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.both(self.first(inputs), inputs)
        return outputs


def test_what_prevents_a_cut_is_named_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"both \(Bilinear\) does not take the outputs of first"):
        cuts_of(Branched(), StageCut(stages=2), sample=torch.ones(2, 6))
    opt: Any = {
        "model_type": "opt", "vocab_size": 11, "hidden_size": 16, "ffn_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 8,
        "word_embed_proj_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    whole = build_model("transformers", config=opt, context=8)
    with pytest.raises(ConfigError, match=r"outputs of model \(OPTModel\).*name one of .*gpt2"):
        cuts_of(whole, StageCut(stages=2), sample=torch.ones(2, 8, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"Embedding, AddedPositions, 4 GPT2Block.*stages = 8 in"):
        cuts_of(made("transformers gpt2"), StageCut(stages=9))
    tied = build_model("transformers", config=TINY_LLAMA, context=8)
    with pytest.raises(ConfigError, match=r"tie_word_embeddings = false in \[model.config\]"):
        ModelStage(tied, 0, StageCut(stages=2))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_every_stage_has_weights_to_train() -> None:
    units = [nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)]
    model = nn.Sequential(*units)
    assert cuts_of(model, StageCut(stages=3)) == (3, 5)
    with pytest.raises(ConfigError, match=r"3 such units.*stages = 3 in"):
        cuts_of(model, StageCut(stages=4))
