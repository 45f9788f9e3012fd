"""What single models promise beyond the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.errors import ConfigError
from atoll.models import (
    GPT2,
    GPT2Config,
    Llama,
    LlamaConfig,
    ResNet,
    ResNetConfig,
    ViT,
    ViTConfig,
    build_model,
)
from atoll.models.attention import Attention
from atoll.models.rotation import rotation_tables, turned


def stirred(model: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_later_tokens_do_not_change_earlier_logits(name: str) -> None:
    model = stirred(build_model(name, vocab_size=11, width=32, context=8))
    ids = torch.arange(8)[None] % 11
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(ids), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-5)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_order_of_earlier_tokens_matters(name: str) -> None:
    model = stirred(build_model(name, vocab_size=11, width=32, context=8))
    one, other = model(torch.tensor([[1, 2, 3, 4]])), model(torch.tensor([[2, 1, 3, 4]]))
    assert not torch.allclose(one[:, -1], other[:, -1], atol=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_too_long_a_sequence_names_both_lengths(name: str) -> None:
    with pytest.raises(ConfigError, match=r"given: 9 tokens; expected: at most 8"):
        build_model(name, context=8)(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tied_output_layer_is_the_embedding(name: str) -> None:
    tied, untied = (build_model(name, vocab_size=300, tie=tie) for tie in (True, False))
    count = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert count[1] - count[0] == 300 * 64


def test_smallest_published_gpt2_has_as_many_parameters() -> None:
    with torch.device("meta"):
        config = GPT2Config(vocab_size=50257, layers=12, width=768, heads=12, context=1024)
        assert GPT2(config).num_parameters == 124_439_808


def test_llama_of_seven_billion_has_as_many_parameters() -> None:
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=32_000, layers=32, width=4096, heads=32, hidden=11_008, context=8, tie=False
        )
        assert Llama(config).num_parameters == 6_738_415_616


def test_resnet_20_has_the_published_size() -> None:
    matrices = [p for p in ResNet(ResNetConfig(blocks=3)).parameters() if p.dim() > 1]
    assert len(matrices) == 20 + 2  # and two shortcuts
    assert sum(p.numel() for p in matrices if p.shape[2:] != (1, 1)) == pytest.approx(270e3, 0.02)


def test_turned_products_depend_on_the_distance_alone() -> None:
    cosines, sines = rotation_tables(12, 8, base=10_000.0)
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    queries, keys = (x.expand(1, 12, 1, 8) for x in (query, key))
    products = torch.einsum(
        "blhf,bmhf->lm", turned(queries, cosines, sines), turned(keys, cosines, sines)
    )
    for distance in range(12):
        diagonal = products.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4)


def test_grouped_heads_equal_copied_keys_and_values() -> None:
    torch.manual_seed(0)
    grouped = Attention(16, heads=4, kv_heads=2, causal=True, bias=False)
    whole = Attention(16, heads=4, causal=True, bias=False)
    with torch.no_grad():
        for name in ("queries", "merge"):
            getattr(whole, name).weight.copy_(getattr(grouped, name).weight)
        for name in ("keys", "values"):
            heads = getattr(grouped, name).weight.view(2, 4, 16)
            getattr(whole, name).weight.copy_(heads.repeat_interleave(2, dim=0).flatten(0, 1))
    x = torch.randn(2, 5, 16)
    assert torch.allclose(grouped(x), whole(x), atol=1e-6)


def test_patches_of_a_vision_transformer_see_each_other() -> None:
    model = stirred(ViT(ViTConfig(image=8, patch=4, layers=1, width=16, heads=2)))
    images = torch.zeros(1, 1, 8, 8, requires_grad=True)
    model.blocks[0](model.embedding(images))[0, 0].sum().backward()
    assert images.grad is not None
    assert (images.grad != 0).all()


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_residual_network_halves_the_image_twice(norm: str) -> None:
    model = ResNet(ResNetConfig(norm=norm, width=8))
    x = model.stem(torch.randn(2, 1, 28, 28))
    for block in model.blocks:
        x = block(x)
    assert x.shape == (2, 32, 7, 7)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"heads": 4, "kv_heads": 3}, r"not a multiple.*kv_heads of 1, 2, 4"),
        ("llama", {"width": 66, "heads": 3, "hidden": -1}, "hidden is too small"),
        ("llama", {"width": 65}, r"try width=72"),
        ("gpt2", {"width": 66}, r"multiple of 4; what to do: try width=68"),
        ("gpt2", {"dropout": 1.0}, "dropout is out of range"),
        ("vit", {"image": 28, "patch": 5}, r"cannot be cut into patches.*try patch=4"),
        ("vit", {"layers": 0}, "layers is too small"),
        ("resnet", {"norm": "grup"}, "did you mean 'group'"),
        ("resnet", {"width": 12}, r"groups do not divide.*try width=16"),
    ],
)
def test_sizes_without_sense_name_what_would_do(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(name, **options)
