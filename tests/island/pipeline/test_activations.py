"""What stages exchange on real ranks: subspaces, codecs, and both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.errors import ConfigError
from atoll.models.gpt import GPT
from atoll.strategies.inner.pipeline.activations import activation_codec, decoded, encoded
from atoll.strategies.inner.pipeline.subspace import SEED, Constraint, Subspace, residual_stream
from tests.island.leading import Member, led, table
from tests.island.pipeline.kit import ROWS, merged, pipeline, steps
from tests.island.pool import Ranks
from tests.island.reference import assert_same, batch_for, gpt, perceptron

SIZE = 5
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "interleaved", "chunks": 2},
    {"schedule": "async"},
]  # fmt: skip


def _projected(cut: int) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of an undivided model that sends before unit `cut`."""
    model = gpt(layers=5, tie=False)
    subspace = Subspace.drawn(16, SIZE, seed=SEED)
    ended = {id(p) for unit in model.units()[cut:] for p in unit.parameters()}
    sending = {n: p for n, p in model.named_parameters() if id(p) not in ended}
    outside = subspace.outside(model.embedding.weight.detach())
    constraint = Constraint.of(sending, residual_stream(model), subspace, outside)
    constraint.project()
    loss = model.loss(*batch_for(model, rows=ROWS))
    loss.backward()  # type: ignore[no-untyped-call]
    constraint.project_gradients()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("words", SCHEDULES)
@pytest.mark.every(3)
def test_gradients_in_a_subspace_are_those_of_one_device(
    ranks: Ranks, words: dict[str, Any]
) -> None:
    cuts = (2, 4, 6) if "chunks" in words else (4,)
    loss, expected = _projected(cuts[-1])
    more = {"activations": f"subspace:{SIZE}", "cuts": cuts, **words}
    found = ranks.run(2, steps, "untied", {"pipeline": 2}, more, [4])
    assert [one[0][0] for one in found] == pytest.approx([loss] * 2, rel=1e-6)
    assert_same(merged([one[0][1] for one in found]), expected, within=1e-6)


@pytest.mark.parametrize("words", SCHEDULES)
@pytest.mark.every(3)
def test_a_subspace_of_full_width_is_the_dense_pipeline(
    ranks: Ranks, words: dict[str, Any]
) -> None:
    cuts = (2, 4, 6) if "chunks" in words else (4,)
    dense, whole = (
        ranks.run(2, steps, "untied", {"pipeline": 2}, {**words, **more, "cuts": cuts}, [4])
        for more in ({}, {"activations": "subspace:16"})
    )
    for (loss, gradients), (same, others) in (
        (a[0], b[0]) for a, b in zip(dense, whole, strict=True)
    ):
        assert loss == same
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def _sizes(words: dict[str, Any], rows: int) -> tuple[int, float]:
    """Return the bytes of a microbatch between two stages, and the loss."""
    model = gpt(layers=5, tie=False).float()
    parts = pipeline(model, {"pipeline": 2}, microbatches=4, **words)
    inputs, targets = batch_for(model, rows=rows)
    loss = parts.backward(inputs, targets).item()
    return parts.boundary_bytes(inputs), loss


def test_bytes_between_stages_are_those_of_the_format(ranks: Ranks) -> None:
    tokens, head = 16 * 6, 32
    expected = {
        "none": tokens * 16 * 4,
        "subspace:2": tokens * 2 * 4,
        "int8": head + tokens * 16 + 4 * 6,
        "subspace:2|int8": head + tokens * 2 + 4,
        "subspace:2|int6": head + tokens * 2 * 6 // 8 + 8,
    }
    losses = {}
    for spec, nbytes in expected.items():
        (found, losses[spec]), _ = ranks.run(2, _sizes, {"activations": spec}, 64)
        assert found == nbytes, spec
    assert 1e-7 < abs(losses["int8"] - losses["none"]) < 0.01
    assert losses["subspace:2|int8"] == pytest.approx(losses["subspace:2"], abs=0.01)


@pytest.mark.parametrize("words", SCHEDULES)
@pytest.mark.every(3)
def test_gradients_through_int8_are_close(ranks: Ranks, words: dict[str, Any]) -> None:
    more = {"activations": "int8", **words}
    plainly, rounded = (
        ranks.run(2, steps, "perceptron", {"pipeline": 2}, one, [4]) for one in (words, more)
    )
    expected, found = (merged([one[0][1] for one in by]) for by in (plainly, rounded))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-6, name
    assert any(not torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_carriers_keep_shape_and_type(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 7).to(dtype)
    codec = make_codec("int8")
    found = decoded(encoded(x, codec), codec)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), x.float(), atol=0.03, rtol=0.01)


@pytest.mark.parametrize("spec", ["feedback(topk:0.1)", "lowrank:2", "ef21(topk:0.1)"])
def test_codecs_that_remember_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="cannot be sent with this codec"):
        activation_codec(spec)


def _trained(words: dict[str, Any]) -> Any:
    def use(member: Member) -> Any:
        member.parameters()
        start = {n: p.detach().clone() for n, p in member.task.model.named_parameters()}
        member.train(3)
        found = member.parameters()
        batch = batch_for(member.task.model, rows=8, seed=99)
        assert member.broadcaster is not None
        loss = member.broadcaster.call("loss", batch)
        return start, found, loss.item()

    train = table(optimizer="torch:NAdam")
    return led(use, "untied", train, {"pipeline": 2}, cuts=(3,), **words)


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_the_host_model_is_the_one_that_the_ranks_train(ranks: Ranks, schedule: str) -> None:
    words = {"activations": f"subspace:{SIZE}", "schedule": schedule, "microbatches": 2}
    (start, found, loss), _ = ranks.run(2, _trained, words)
    subspace = Subspace.drawn(16, SIZE, seed=SEED)
    for weights in (start, found):
        for name in ("blocks.0.merge.weight", "blocks.0.down.weight"):
            assert float(subspace.outside(weights[name].T).abs().max()) < 1e-6
        assert float(subspace.outside(weights["blocks.2.down.weight"].T).abs().max()) > 0.01
    outside = [subspace.outside(weights["embedding.weight"]) for weights in (start, found)]
    torch.testing.assert_close(*outside, atol=1e-6, rtol=0)
    assert not torch.equal(start["embedding.weight"], found["embedding.weight"])
    model: GPT = gpt(tie=False)
    model.load_state_dict(found, strict=False)
    with torch.no_grad():  # a plain model with these weights computes the same
        assert model.loss(*batch_for(model, rows=8, seed=99)).item() == pytest.approx(
            loss, rel=1e-6
        )


REFUSED: list[tuple[Callable[[], Any], dict[str, int], dict[str, Any], str]] = [
    (gpt, {"pipeline": 2}, {"activations": "subspace:4"}, "confined to a subspace"),
    (perceptron, {"pipeline": 2}, {"activations": "subspace:4"}, "confined to a subspace"),
    (gpt, {"pipeline": 2, "shard": 2}, {"activations": "subspace:4"}, "whole matrices"),
    (gpt, {"pipeline": 2, "shard": 2}, {"schedule": "async"}, "pipeline and replicate only"),
    (gpt, {"pipeline": 2}, {"schedule": "async"}, "tie = false"),
]


def _refused(place: int) -> str:
    make, axes, words, _ = REFUSED[place]
    with pytest.raises(ConfigError) as error:
        pipeline(make(), axes, **words)
    return str(error.value)


@pytest.mark.parametrize("place", range(len(REFUSED)))
@pytest.mark.every(3)
def test_what_cannot_be_packed_is_refused(ranks: Ranks, place: int) -> None:
    _, axes, _, message = REFUSED[place]
    count = 4 if len(axes) > 1 else 2
    assert all(message in found for found in ranks.run(count, _refused, place))
