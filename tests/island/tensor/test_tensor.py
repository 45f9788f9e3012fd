"""A model split over tensor ranks computes what it computes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.errors import ConfigError
from tests.island.pool import Ranks
from tests.island.tensor.cases import (
    LAYERS,
    LENGTH,
    ROWS,
    WIDTH,
    Case,
    Collectives,
    alone,
    make,
    split,
    together,
    whole,
)
from tests.tiers import sampled

SHAPES = ({"tensor": 2}, {"tensor": 4}, {"shard": 2, "tensor": 2})


def _check(ranks: Ranks, case: Case, *, bound: float = 1e-10) -> None:
    """Loss, parameters and gradients of all ranks are those of one process."""
    expected = alone(case)
    found = ranks.run(case.ranks, together, case)
    mean = sum(rank.loss for rank in found) / len(found)
    assert mean == pytest.approx(expected.loss, abs=bound)
    for rank in found:
        assert rank.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            assert torch.equal(rank.parameters[name], expected.parameters[name]), name
            assert (rank.gradients[name] - gradient).abs().max() < bound, name


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("vocabulary", [False, True])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    "shape",
    sampled(
        SHAPES,
        lambda shape: shape == {"tensor": 2},
        "tests/island/tensor/test_tensor.py::test_gradients_equal_those_of_one_process",
    ),
    ids=["2", "4", "2x2"],
)
@pytest.mark.every(5)
def test_gradients_equal_those_of_one_process(
    ranks: Ranks, shape: dict[str, int], tie: bool, vocabulary: bool, sequence: bool
) -> None:
    recipe = {"vocabulary": vocabulary, "sequence": sequence}
    _check(ranks, Case(options={"tie": tie}, shape=shape, recipe=recipe))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "vit"])
@pytest.mark.every(5)
def test_other_models_are_split_as_well(ranks: Ranks, kind: str, sequence: bool) -> None:
    options = {"kv_heads": 2} if kind == "llama" else {}
    _check(ranks, Case(kind=kind, options=options, recipe={"sequence": sequence}))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.every(4)  # test_causal_lm.py has others
def test_models_of_transformers_bring_their_plan(ranks: Ranks, kind: str, tie: bool) -> None:
    _check(ranks, Case(kind=kind, options={"tie_word_embeddings": tie}))


def test_a_plan_of_the_job_file_splits_any_model(ranks: Ranks) -> None:
    plan = {"first": "column", "sec*": "row"}
    _check(ranks, Case(kind="perceptron", recipe={"plan": plan}))


# --------------------------------------------------------------------------------- what is sent


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.every(2)
def test_half_a_block_costs_one_sum_forward_and_one_backward(ranks: Ranks, kind: str) -> None:
    (found, *_) = ranks.run(2, together, Case(kind=kind, recipe={"vocabulary": False}))
    assert found.forward == {"sum": 2 * LAYERS}
    assert found.backward == {"sum": 2 * LAYERS}
    assert found.elements == {"sum": 4 * LAYERS * ROWS * LENGTH * WIDTH}


def test_under_sequence_a_sum_is_a_gather_and_a_scatter(ranks: Ranks) -> None:
    recipe = {"vocabulary": False, "sequence": True}
    (found, *_) = ranks.run(2, together, Case(recipe=recipe))
    # Once per model: pieces are put together before the output layer, and cut behind the embedding.
    assert found.forward == {"gather": 2 * LAYERS + 1, "scatter": 2 * LAYERS}
    assert found.backward == {"gather": 2 * LAYERS + 1, "scatter": 2 * LAYERS}
    activations = ROWS * LENGTH * WIDTH
    assert found.elements["scatter"] == 4 * LAYERS * activations
    assert found.elements["gather"] == (4 * LAYERS + 2) * activations


def test_a_split_vocabulary_never_gathers_logits(ranks: Ranks) -> None:
    (found, *_) = ranks.run(2, together, Case())
    assert found.forward == {"sum": 2 * LAYERS + 1 + 2}, "the embedding, and two of the loss"
    assert found.backward == {"sum": 2 * LAYERS + 1}, "the features before the output layer"
    per_token = 4 * LAYERS * WIDTH + 2 * WIDTH + 1 + 3
    assert found.elements == {"sum": ROWS * LENGTH * per_token}


# --------------------------------------------------------------------------------- random numbers


def _dropped(case: Case) -> tuple[Tensor, Tensor, float]:
    """What two dropouts let through of ones: inside the split, and behind it."""
    model, inputs, _ = make(case)
    split(case, model)
    seen: list[Tensor] = []
    for part in (model.dropout, model.after):
        part.register_forward_pre_hook(lambda _, given: (torch.ones_like(given[0]),))
        part.register_forward_hook(lambda _, __, outputs: seen.append(outputs.detach()))
    torch.manual_seed(11)
    model(inputs)
    return seen[0], seen[1], torch.rand(()).item()


def test_dropouts_differ_inside_a_split_and_agree_outside(ranks: Ranks) -> None:
    plan = {"first": "column", "second": "row"}
    case = Case(kind="perceptron", options={"dropout": 0.5}, recipe={"plan": plan})
    (inside, outside, next_), (inside_2, outside_2, next_2) = ranks.run(2, _dropped, case)
    assert not torch.equal(inside, inside_2)
    assert torch.equal(outside, outside_2)
    assert next_ == next_2
    again, _ = ranks.run(2, _dropped, case)
    assert torch.equal(inside, again[0])


def _dropped_pieces(case: Case) -> Tensor:
    model, inputs, _ = make(case)
    split(case, model)
    seen: list[Tensor] = []
    part = model.blocks[0].dropout
    part.register_forward_pre_hook(lambda _, given: (torch.ones_like(given[0]),))
    part.register_forward_hook(lambda _, __, outputs: seen.append(outputs.detach()))
    torch.manual_seed(11)
    model(inputs)
    return seen[0]


def test_pieces_of_a_sequence_drop_different_features(ranks: Ranks) -> None:
    case = Case(options={"dropout": 0.5}, recipe={"sequence": True})
    first, second = ranks.run(2, _dropped_pieces, case)
    assert first.shape == second.shape == (ROWS, LENGTH // 2, WIDTH)
    assert not torch.equal(first, second)


def _cross(case: Case) -> tuple[float, float]:
    """Random numbers after a split with two inputs, and without it."""
    torch.manual_seed(11)
    torch.randint(2**62, ())
    expected = torch.rand(()).item()
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("q", "k", "out")})
    model.dropout = torch.nn.Dropout(0.5)
    split(case, model)
    torch.manual_seed(11)
    queries = model["q"](torch.ones(2, 4))
    keys = model["k"](torch.zeros(2, 4))
    model["out"](model["dropout"](queries + keys))
    return torch.rand(()).item(), expected


def test_a_split_of_two_inputs_gives_the_shared_numbers_back(ranks: Ranks) -> None:
    plan = {"q": "column", "k": "column", "out": "row"}
    found = ranks.run(2, _cross, Case(recipe={"plan": plan}))
    assert [after for after, _ in found] == [expected for _, expected in found]


def _with_dropout(case: Case, recompute: bool) -> tuple[float, dict[str, Tensor]]:
    from torch.utils.checkpoint import checkpoint

    model, inputs, targets = make(case)
    split(case, model)
    if recompute:
        for block in model.blocks:
            block.forward = _Again(checkpoint, block.forward)
    torch.manual_seed(11)
    loss = model.criterion(model(inputs), targets)
    loss.backward()
    return loss.item(), {n: p.grad.to_local() for n, p in model.named_parameters() if "up" in n}


class _Again:
    def __init__(self, checkpoint: Any, forward: Any) -> None:
        self.checkpoint, self.forward = checkpoint, forward

    def __call__(self, x: Tensor) -> Any:
        return self.checkpoint(self.forward, x, use_reentrant=False)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.every(2)
def test_a_repeated_forward_pass_drops_the_same(ranks: Ranks, sequence: bool) -> None:
    case = Case(options={"dropout": 0.3}, recipe={"sequence": sequence})
    plain, repeated = (ranks.run(2, _with_dropout, case, again) for again in (False, True))
    for (loss, gradients), (loss_2, gradients_2) in zip(plain, repeated, strict=True):
        assert loss == loss_2 == plain[0][0]
        for name in gradients:
            assert torch.equal(gradients[name], gradients_2[name]), name


# --------------------------------------------------------------------------------- in company


def _half(case: Case, kind: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    model, inputs, targets = make(case)
    if torch.distributed.get_world_size() > 1:
        split(case, model)
    with torch.autocast("cpu", kind):
        outputs = model(inputs)
        assert outputs.dtype == kind
        loss = model.criterion(outputs, targets)
    assert loss.dtype == torch.float32
    loss.backward()
    return loss.item(), {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.every(3)
def test_half_precision_works_inside(
    ranks: Ranks, kind: torch.dtype, bound: float, sequence: bool
) -> None:
    case = Case(dtype=torch.float32, recipe={"sequence": sequence})
    ((loss, expected),) = ranks.run(1, _half, case, kind)
    for found, gradients in ranks.run(2, _half, case, kind):
        assert found == pytest.approx(loss, rel=bound)
        for name, gradient in expected.items():
            if "norm" in name and sequence:
                continue  # still partial: `complete` is another's work
            assert (gradients[name] - gradient).norm() < 5 * bound * gradient.norm(), name


def _half_sent(case: Case) -> tuple[int, int]:
    model, inputs, _ = make(case)
    split(case, model)
    with Collectives() as forward, torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs)
    with Collectives() as backward:
        outputs.float().sum().backward()
    return forward.sent_bytes, backward.sent_bytes


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.every(2)
def test_half_precision_is_half_as_much_to_send(ranks: Ranks, sequence: bool) -> None:
    recipe = {"vocabulary": False, "sequence": sequence}
    case = Case(dtype=torch.float32, recipe=recipe)
    activations = ROWS * LENGTH * WIDTH
    (forward, backward), _ = ranks.run(2, _half_sent, case)
    # With pieces a sum is a gather and a scatter; and the ends of the model are not half.
    blocks = 2 * LAYERS * activations * 2 * (2 if sequence else 1)
    ends = activations * 4 if sequence else 0
    assert (forward, backward) == (blocks + ends, blocks + ends)


def _compiled(case: Case) -> dict[str, Tensor]:
    model, inputs, targets = make(case)
    split(case, model)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    model.criterion(model(inputs), targets).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.long("tests/train/test_compiled.py::test_two_members_end_as_without_compiling")
def test_blocks_may_be_compiled(ranks: Ranks) -> None:
    case = Case()
    expected = alone(case).gradients
    for gradients in ranks.run(2, _compiled, case):
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).abs().max() < 1e-10, name


# --------------------------------------------------------------------------------- refusals


def _refused(case: Case) -> str:
    model, *_ = make(case)
    with pytest.raises(ConfigError) as caught:
        split(case, model)
    return str(caught.value)


def test_a_tied_matrix_is_split_in_one_way(ranks: Ranks) -> None:
    plan = {"blocks.*.up": "column", "blocks.*.down": "row", "head": "vocabulary"}
    (told, _) = ranks.run(2, _refused, Case(recipe={"plan": plan}))
    assert "splits a shared matrix in different ways" in told
    assert "embedding: whole, head: (Shard(dim=0),)" in told


def test_an_uneven_sequence_is_refused_with_its_length(ranks: Ranks) -> None:
    case = Case(kind="vit", options={"image": 6}, recipe={"sequence": True})
    (told, _) = ranks.run(2, _refused_image, case)
    assert "9 positions, 2 tensor ranks" in told
    assert "sequences of 8" in told


def _refused_image(case: Case) -> str:
    model, inputs, _ = make(case)
    split(case, model)
    with pytest.raises(ConfigError) as caught:
        model(inputs[:, :, :6, :6])
    return str(caught.value)


def test_collectives_are_counted_at_all(ranks: Ranks) -> None:
    assert ranks.run(2, _one_sum) == [{"sum": 1}, {"sum": 1}]


def _one_sum() -> dict[str, int]:
    with Collectives() as seen:
        torch.distributed.all_reduce(torch.ones(3))
    return dict(seen.counts)
