"""The cross-entropy over slices of logits is the one over whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from atoll.errors import ConfigError
from atoll.strategies.inner.tensor.vocabulary import split_criterion
from tests.island.pool import Ranks

TOKENS = 12


def _logits(shape: tuple[int, ...], *, scale: float) -> tuple[Tensor, Tensor]:
    some = torch.Generator().manual_seed(8)
    logits = scale * torch.randn(shape, generator=some, dtype=torch.float64)
    targets = torch.randint(0, TOKENS, (*shape[:1], *shape[2:]), generator=some)
    return logits, targets


def _sliced(
    shape: tuple[int, ...], scale: float, ignored: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of this rank's slice."""
    logits, targets = _logits(shape, scale=scale)
    if ignored:
        targets.view(-1)[::3] = options.get("ignore_index", -100)
    own = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()
    loss = split_criterion(_criterion(options), group=dist.group.WORLD, tokens=TOKENS)(own, targets)
    loss.sin().sum().backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    return loss.detach(), own.grad


def _criterion(options: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: functional.cross_entropy(outputs, targets, **options)


@pytest.mark.parametrize("ranks_", [2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "scale", "ignored", "options"),
    [
        ((6, TOKENS), 1.0, False, {}),
        ((6, TOKENS), 400.0, False, {}),
        ((6, TOKENS), 1.0, True, {}),
        ((6, TOKENS), 1.0, True, {"ignore_index": 3, "reduction": "sum"}),
        ((2, TOKENS, 5), 1.0, True, {"reduction": "none"}),
        ((6, TOKENS), 1.0, True, {"label_smoothing": 0.2}),
    ],
    ids=["plain", "huge", "ignored", "sum", "none", "smooth"],
)
@pytest.mark.every(4)
def test_slices_give_the_loss_of_the_whole(
    ranks: Ranks,
    ranks_: int,
    shape: tuple[int, ...],
    scale: float,
    ignored: bool,
    options: dict[str, Any],
) -> None:
    logits, targets = _logits(shape, scale=scale)
    if ignored:
        targets.view(-1)[::3] = options.get("ignore_index", -100)
    logits.requires_grad_()
    loss = functional.cross_entropy(logits, targets, **options)
    loss.sin().sum().backward()  # type: ignore[no-untyped-call]
    found = ranks.run(ranks_, _sliced, shape, scale, ignored, options)
    assert logits.grad is not None
    for own, _ in found:
        assert torch.allclose(own, loss, rtol=1e-12, atol=1e-12)
    gradient = torch.cat([own for _, own in found], dim=1)
    assert (gradient - logits.grad).abs().max() < 1e-12


def _infinite() -> tuple[Tensor, Tensor]:
    """Return logits with an ignored row of infinities, and a ruled out token in every row."""
    logits, targets = _logits((4, TOKENS), scale=1.0)
    logits[:, 0] = float("-inf")
    logits[1, 2:] = float("inf")
    targets[:] = torch.tensor([1, -100, 5, 11])
    return logits, targets


def _of_infinite() -> tuple[Tensor, Tensor]:
    logits, targets = _infinite()
    own = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()
    loss = split_criterion(_criterion({}), group=dist.group.WORLD, tokens=TOKENS)(own, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    return loss.detach(), own.grad


def test_an_ignored_row_of_infinite_logits_does_not_count(ranks: Ranks) -> None:
    logits, targets = _infinite()
    counted = targets != -100
    rest = logits[counted].requires_grad_()
    loss = functional.cross_entropy(rest, targets[counted])
    loss.backward()  # type: ignore[no-untyped-call]
    assert rest.grad is not None
    found = ranks.run(2, _of_infinite)
    for own, _ in found:
        assert torch.allclose(own, loss, rtol=1e-12, atol=1e-12)
    gradient = torch.cat([own for _, own in found], dim=1)
    assert (gradient[counted] - rest.grad).abs().max() < 1e-12
    assert not gradient[~counted].any()


def _refused(kind: str) -> str:
    def nothing(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.logsumexp(-1).mean()

    criterion = nothing if kind == "other" else _criterion({})
    if kind == "weights":
        criterion = _criterion({"weight": torch.ones(TOKENS)})
    logits = torch.zeros(4, TOKENS if kind == "whole" else TOKENS // 2)
    targets = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ConfigError) as caught:
        split_criterion(criterion, group=dist.group.WORLD, tokens=TOKENS)(logits, targets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other", "does not call torch.nn.functional.cross_entropy"),
        ("weights", "weights"),
        ("whole", "logits (4, 12), 12 tokens"),
    ],
)
def test_a_loss_that_cannot_be_split_is_refused(ranks: Ranks, kind: str, message: str) -> None:
    for told in ranks.run(2, _refused, kind):
        assert "cannot be split by tokens" in told
        assert message in told
        assert "vocabulary = false" in told
