from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.models import GPT, GPTConfig
from atoll.strategies.vectors.flat import Flat
from atoll.strategies.vectors.fragments import Fragment, cut, layer_of, names_of


def tensors_of(model: nn.Module) -> list[Tensor]:
    """What members agree on: tables that every model makes for itself are not among it."""
    saved = model.state_dict().keys()
    buffers = [b for name, b in model.named_buffers() if name in saved and b.is_floating_point()]
    return [*model.parameters(), *buffers]


def fragments_of(model: nn.Module, count: int, pattern: str = "strided") -> list[Fragment]:
    tensors = tensors_of(model)
    return cut(
        tensors, names_of(model, tensors), trained=len(list(model.parameters())), count=count,
        pattern=pattern,
    )  # fmt: skip


def gpt(layers: int = 6) -> GPT:
    return GPT(GPTConfig(vocab_size=50, layers=layers, width=16, heads=2, context=16))


def layers_in(fragment: Fragment, names: Sequence[str]) -> list[str]:
    whole = [names[piece.index] for piece in fragment.pieces if piece.rows is None]
    return list(dict.fromkeys(filter(None, map(layer_of, whole))))


@pytest.mark.parametrize("pattern", ["strided", "sequential"])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_every_number_is_in_exactly_one_fragment(pattern: str, count: int) -> None:
    model = gpt()
    flat = Flat(tensors_of(model))
    marks = flat.new().zero_()
    for fragment in fragments_of(model, count, pattern):
        part = fragment.of(flat.views(marks))
        part.write(part.read() + 1)
        assert part.num_elements == fragment.num_elements
    assert torch.equal(marks, torch.ones_like(marks))


def test_layers_take_turns_or_stay_with_their_neighbours() -> None:
    model = gpt()
    names = names_of(model, tensors_of(model))
    found = {
        pattern: [
            [int(layer.rsplit(".", 1)[1]) for layer in layers_in(fragment, names)]
            for fragment in fragments_of(model, 3, pattern)
        ]
        for pattern in ("strided", "sequential")
    }
    assert found["strided"] == [[0, 3], [1, 4], [2, 5]]
    assert found["sequential"] == [[0, 1], [2, 3], [4, 5]]


def test_even_layers_give_even_fragments() -> None:
    sizes = [fragment.num_elements for fragment in fragments_of(gpt(6), 3)]
    assert max(sizes) - min(sizes) <= 3 * 16, "embedding, head and norm are cut by rows of 16"


def test_a_model_with_fewer_layers_than_fragments_is_cut_by_rows() -> None:
    sizes = [fragment.num_elements for fragment in fragments_of(gpt(2), 4)]
    assert sum(sizes) == sum(tensor.numel() for tensor in tensors_of(gpt(2)))
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize("count", range(1, 8))
def test_runs_of_neighbours_leave_no_fragment_without_a_layer(count: int) -> None:
    model = nn.Sequential(nn.Linear(40, 40), *(nn.Linear(2, 2) for _ in range(6)))
    names = names_of(model, tensors_of(model))
    dealt = [layers_in(fragment, names) for fragment in fragments_of(model, count, "sequential")]
    assert all(dealt)
    assert [layer for part in dealt for layer in part] == [str(n) for n in range(7)]


def test_buffers_go_with_their_layer_behind_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    first, second = fragments_of(model, 2)
    assert (first.num_elements, first.num_parameters) == (15, 15)
    assert (second.num_elements, second.num_parameters) == (12, 6)


def test_non_contiguous_layouts_are_updated_in_place() -> None:
    first = nn.Conv2d(4, 4, 3)
    model, kernel = nn.Sequential(first, nn.Linear(2, 2)), first.weight
    kernel.data = kernel.data.contiguous(memory_format=torch.channels_last)
    tensors = tensors_of(model)
    for fragment in fragments_of(model, 2):
        part = fragment.of(tensors)
        part.write(torch.arange(float(part.num_elements)))
        assert torch.equal(part.read(), torch.arange(float(part.num_elements)))
    assert tensors[0].flatten()[7] == 7.0


def test_too_many_fragments_are_refused() -> None:
    with pytest.raises(ConfigError, match="too small for so many fragments"):
        fragments_of(nn.Sequential(nn.Linear(1, 1)), 4)


def test_an_unknown_pattern_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'strided'"):
        fragments_of(gpt(), 2, "stridded")


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.3.attention.weight", "blocks.3"),
        ("0.weight", "0"),
        ("layer1.0.conv1.weight", "layer1.0"),
        ("embedding.weight", ""),
        ("scale", ""),
    ],
)
def test_a_layer_is_a_name_up_to_its_first_number(name: str, layer: str) -> None:
    assert layer_of(name) == layer
