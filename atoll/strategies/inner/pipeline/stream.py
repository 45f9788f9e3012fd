"""One stage of a pipeline that is not flushed between batches, so that it is always busy.

The order of work is 1F1B over the microbatches of all batches. A stage computes both passes of a
microbatch with the weights that were newest when it arrived (weight stashing), so its gradient is
exact at these weights; meanwhile up to `PipelineShape.delay` updates happen. Only the first
microbatches of a batch arrive before the update of the batch before: with m of them and p stages,
p-1-k at stage k. So a batch's gradient lacks (p-1-k) / m updates in the mean, few with large m.
Asynchronous pipelines: Narayanan et al., PipeDream (https://arxiv.org/abs/1806.03377); with a
look-ahead against the delay: Ajanthan et al. (https://arxiv.org/abs/2505.01099).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from atoll.strategies.inner.options import PipelineShape
from atoll.strategies.inner.pipeline.activations import Activations
from atoll.strategies.inner.pipeline.cuts import as_tuple
from atoll.strategies.inner.pipeline.shapes import Kinds, StageShapes, kinds_of
from atoll.strategies.inner.pipeline.timing import Watch

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here


class StashedWeights:
    """A stage's parameters, and the older versions of them that batches in flight need.

    The module's own parameters show one version at a time. Optimizers step on `newest`, which has
    memory of its own as soon as an older version is needed.
    """

    def __init__(self, shown: Mapping[str, nn.Parameter]) -> None:
        """Take over the trained parameters of a module, by their names in the whole model."""
        self._shown = list(shown.values())
        # `data`, not `detach()`: a step would count as a change of what autograd has saved.
        self.newest = {name: nn.Parameter(p.data) for name, p in shown.items()}

    def version(self) -> list[Tensor]:
        """Return the newest weights, to be shown later."""
        return [p.data for p in self.newest.values()]

    def show(self, version: Sequence[Tensor]) -> None:
        """Let the module compute with a version."""
        for parameter, tensor in zip(self._shown, version, strict=True):
            parameter.data = tensor

    def keep(self, versions: Sequence[Sequence[Tensor]]) -> int:
        """Move the newest weights to new memory if one of the versions is in theirs.

        Returns the number of versions with memory of their own.
        """
        places = {tuple(t.data_ptr() for t in version) for version in versions}
        if tuple(p.data_ptr() for p in self.newest.values()) in places:
            for parameter in self.newest.values():
                parameter.data = parameter.data.clone()
        return len(places)

    def hand_over(self) -> None:
        """Move the gradients from the module's parameters to the newest ones."""
        for shown, newest in zip(self._shown, self.newest.values(), strict=True):
            newest.grad, shown.grad = shown.grad, None


class Neighbours:
    """Sends to the stages before and after, and receives from them, in order."""

    def __init__(self, *, forward: Any, backward: Any, device: torch.device, depth: int) -> None:
        """Use one group of the row's ranks per direction; up to `depth` messages are under way."""
        self._groups, self._device, self._depth = {1: forward, -1: backward}, device, depth
        self._rank = dist.get_rank(forward)
        self._sent: dict[int, deque[list[tuple[Any, Tensor]]]] = {1: deque(), -1: deque()}
        self._posted: dict[int, deque[list[tuple[Any, Tensor]]]] = {1: deque(), -1: deque()}

    def send(self, tensors: Sequence[Tensor], *, to: int) -> None:
        """Send to the next stage (+1) or the previous one (-1), without waiting."""
        peer, group, sent = self._rank + to, self._groups[to], self._sent[to]
        given = [t.detach().contiguous() for t in tensors]
        sent.append([(dist.isend(t, group_dst=peer, group=group), t) for t in given])
        while len(sent) > self._depth:
            _wait(sent.popleft())

    def post(self, kinds: Kinds, *, moving: int) -> None:
        """Prepare for a message that moves forward (+1) or backward (-1)."""
        peer, group = self._rank - moving, self._groups[moving]
        empty = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in kinds]
        self._posted[moving].append(
            [(dist.irecv(t, group_src=peer, group=group), t) for t in empty]
        )

    def receive(self, kinds: Kinds, *, moving: int) -> list[Tensor]:
        """Return the next message of a direction, waiting for it."""
        if not self._posted[moving]:
            self.post(kinds, moving=moving)
        return _wait(self._posted[moving].popleft())

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        for sent in self._sent.values():
            while sent:
                _wait(sent.popleft())


def _wait(works: list[tuple[Any, Tensor]]) -> list[Tensor]:
    for work, _ in works:
        work.wait()
    return [tensor for _, tensor in works]


@dataclass(eq=False)
class Batch:
    """A batch in flight, as one stage sees it."""

    inputs: Sequence[Tensor]
    """By microbatch."""
    targets: Sequence[Tensor]
    factor: float
    """Of each microbatch's loss."""
    rates: Sequence[float]
    """Learning rate of each optimizer group in this batch's update."""
    weights: list[Sequence[Tensor]] = field(default_factory=list)
    """Of the stage, by microbatch so far."""
    loss: float = 0.0
    """Sum over the microbatches so far, times `factor`; on the last stage."""
    left: int = field(init=False)
    """Backward passes to do."""

    def __post_init__(self) -> None:
        self.left = len(self.inputs)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A microbatch between its two passes."""

    batch: Batch
    weights: Sequence[Tensor]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


Done = Callable[[Batch], None]
"""Called on each stage when the gradient of a batch is complete, in `StashedWeights.newest`."""


@dataclass(frozen=True, slots=True)
class RankStage:
    """What one rank computes."""

    rank: int
    forward: Callable[..., Any]
    criterion: Callable[[Any, Tensor], Tensor]
    shapes: StageShapes
    learns: Sequence[bool]
    """Of every boundary, 0 to p, whether gradients pass it."""


class Stream:
    """The passes of one rank's stage."""

    def __init__(
        self, stage: RankStage, parameters: Mapping[str, nn.Parameter], shape: PipelineShape,
        neighbours: Neighbours, activations: Activations, watch: Watch,
    ) -> None:  # fmt: skip
        """Take over the trained parameters, by their names in the whole model."""
        self.weights, self.neighbours = StashedWeights(parameters), neighbours
        self.shape, self.rank = shape, stage.rank
        self._stage = stage
        self._given, self._gives = stage.learns[stage.rank], stage.learns[stage.rank + 1]
        self._activations, self._watch = activations, watch
        self._ahead = shape.ranks - 1 - stage.rank
        self._flying: deque[_Flight] = deque()
        self.most_versions = 1
        """Most versions of the weights kept at one time, the newest included."""

    @property
    def first(self) -> bool:
        """Whether this is the first stage."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.rank == self.shape.ranks - 1

    def feed(self, batch: Batch, done: Done) -> None:
        """Start a batch, and finish what is due of earlier ones; on every rank alike."""
        part = batch.inputs[0]
        if not self._stage.shapes.known(part):
            self.drain(done)  # finding the shapes is collective
        kinds = [kinds_of((part,)), *self._stage.shapes.kinds(part)][self.rank]
        self._activations.begin(batch.inputs)
        for number in range(len(batch.inputs)):
            self._forward(batch, number, kinds)
            if len(self._flying) > self._ahead:
                self._backward(done)

    def drain(self, done: Done) -> None:
        """Finish all batches; on every rank alike."""
        while self._flying:
            self._backward(done)
        self.neighbours.flush()
        self.weights.show(self.weights.version())

    def protect(self) -> None:
        """Let the newest weights change without changing those of batches in flight."""
        versions = [flight.weights for flight in self._flying]
        self.most_versions = max(self.most_versions, self.weights.keep(versions) + 1)

    def _forward(self, batch: Batch, number: int, kinds: Kinds) -> None:
        values: tuple[Tensor, ...] = (batch.inputs[number],)
        if not self.first:
            received = self.neighbours.receive(kinds, moving=1)
            if number + 1 < len(batch.inputs):
                self.neighbours.post(kinds, moving=1)
            values = tuple(
                v.requires_grad_(self._given and v.is_floating_point()) for v in received
            )
        weights = self.weights.version()
        batch.weights.append(weights)
        self.weights.show(weights)
        self._activations.enter(number)
        with self._watch.busy(self.rank, forward=True):
            outputs = as_tuple(self._stage.forward(*values))
            if self.last:
                loss = self._stage.criterion(outputs[0], batch.targets[number])
                outputs = (loss * batch.factor,)
                batch.loss += float(outputs[0].detach())
        self._watch.hold(1)
        if not self.last:
            self.neighbours.send(outputs, to=1)
        self._flying.append(_Flight(batch, weights, values, outputs))

    def _backward(self, done: Done) -> None:
        flight = self._flying.popleft()
        batch = flight.batch
        floating = [output for output in flight.outputs if output.is_floating_point()]
        gradients: list[Tensor] = []
        if not self.last and self._gives:
            kinds = kinds_of(floating)
            gradients = self.neighbours.receive(kinds, moving=-1)
            if batch.left > 1:  # after the last gradient of a batch its sums follow
                self.neighbours.post(kinds, moving=-1)
        self.weights.show(flight.weights)
        with self._watch.busy(self.rank, forward=False):
            if self.last:
                gradients = [torch.ones_like(output) for output in floating]
            pairs = zip(floating, gradients, strict=False)  # none if nothing before learns
            learned = [(end, gradient) for end, gradient in pairs if end.requires_grad]
            if learned:
                torch.autograd.backward([e for e, _ in learned], [g for _, g in learned])
        self._watch.hold(-1)
        if not self.first and self._given:
            passed = [v for v in flight.inputs if v.is_floating_point()]
            self.neighbours.send(
                [torch.zeros_like(v) if v.grad is None else v.grad for v in passed], to=-1
            )
        batch.left -= 1
        if not batch.left:
            self.weights.hand_over()
            done(batch)
