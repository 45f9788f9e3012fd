"""Cross-entropy over logits that are split by token between ranks, without gathering them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from atoll.errors import ConfigError

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

Criterion = Callable[[Tensor, Tensor], Tensor]


def split_criterion(criterion: Criterion, *, group: Any, tokens: int) -> Criterion:
    """Return a criterion on slices of logits that equals the given one on whole logits.

    The given one, which MUST use `functional.cross_entropy`, is called unchanged; only that
    function is replaced. The result raises ConfigError if it is not called. `tokens` is the size of
    the vocabulary.
    """

    def computed(outputs: Tensor, targets: Tensor) -> Tensor:
        with _VocabularyParallel(group, tokens) as instead:
            loss = criterion(outputs, targets)
        if not instead.computed:
            raise ConfigError(
                "the loss of this model cannot be split by tokens",
                given="a criterion that does not call torch.nn.functional.cross_entropy",
                remedy="vocabulary = false in [island]",
            )
        return loss

    return computed


class _VocabularyParallel(TorchFunctionMode):
    """Context that computes cross-entropies over the slices of all ranks."""

    def __init__(self, group: Any, tokens: int) -> None:
        super().__init__()
        self._group, self._tokens = group, tokens
        self.computed = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.cross_entropy:
            return func(*args, **(kwargs or {}))
        self.computed += 1
        return split_cross_entropy(*args, **(kwargs or {}), group=self._group, tokens=self._tokens)


def split_cross_entropy(
    input: Tensor,
    target: Tensor,
    *more: Any,
    group: Any,
    tokens: int,
    **named: Any,
) -> Tensor:
    """Return `functional.cross_entropy` of logits with the second dimension split over a group.

    Two all-reduces per call: the largest logit of each row, then three sums. `more` and `named` are
    further arguments of `cross_entropy`; `tokens` is the size of the vocabulary.

    Raises:
        ConfigError: class weights, probabilities as targets, or a slice of another size.
    """
    call = inspect.signature(functional.cross_entropy).bind(input, target, *more, **named)
    call.apply_defaults()
    weight, reduction = call.arguments["weight"], call.arguments["reduction"]
    logits = input.movedim(1, -1) if input.dim() > 1 else input
    share, rest = divmod(tokens, dist.get_world_size(group))
    if weight is not None or target.is_floating_point() or rest or logits.shape[-1] != share:
        raise ConfigError(
            "the loss of this model cannot be split by tokens",
            given=f"logits {tuple(input.shape)}, {tokens} tokens, "
            f"{'weights' if weight is not None else f'targets of {target.dtype}'}",
            expected=f"slices of {share} logits, whole numbers as targets, no weights",
            remedy="vocabulary = false in [island]",
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # as autocast would
    counted = target != call.arguments["ignore_index"]
    apply: Any = _CrossEntropy.apply
    chosen = target.where(counted, 0)
    losses: Tensor = apply(wide, chosen, counted, group, call.arguments["label_smoothing"])
    losses = losses.where(counted, 0.0)  # not a product: an ignored row may have infinite logits
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    """Negative log likelihood per row; logits [..., tokens of this rank], targets [...].

    Rows that are not `counted` [...] get a gradient of zero, whatever their logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, counted: Tensor, group: Any, smoothing: float
    ) -> Tensor:
        share, ranks = logits.shape[-1], dist.get_world_size(group)
        highest = logits.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - highest[..., None]
        place = targets - dist.get_rank(group) * share
        here = (place >= 0) & (place < share)
        place = place.clamp(0, share - 1)[..., None]
        right = shifted.gather(-1, place).squeeze(-1).where(here, 0.0)
        chances = shifted.exp()
        sums = torch.stack((chances.sum(-1), right, shifted.mean(-1) / ranks))
        dist.all_reduce(sums, group=group)
        total, right, mean = sums.unbind()
        chances /= total[..., None]
        chances.masked_fill_(~counted[..., None], 0.0)
        ctx.save_for_backward(chances, place, here)
        ctx.smoothing, ctx.tokens = smoothing, share * ranks
        losses: Tensor = total.log() - (1.0 - smoothing) * right
        return losses - smoothing * mean if smoothing else losses  # a mean may be infinite

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (given,) = gradients
        chances, place, here = ctx.saved_tensors
        spread = given[..., None]
        flat = ctx.smoothing / ctx.tokens
        slope = (chances - flat) * spread if flat else chances * spread
        right = spread * (ctx.smoothing - 1.0) * here[..., None]
        return slope.scatter_add_(-1, place, right), None, None, None, None
