"""Compute microbatches of one stage: forward, backward with the forward pass repeated, and sums.

Of a microbatch only the *inputs* are kept, until :meth:`StageRunner.release`, and after its
backward pass the *pending* gradients, until :meth:`StageRunner.fold` or :meth:`StageRunner.drop`:
they count once the ledger, which sees all members, has attributed the microbatch to this one.

 * A backward pass repeats the forward pass, on this member or on another one of the stage. Its
   random state follows from (seed, step, index, stage), so that dropout repeats itself, too. Random
   numbers of different kinds of devices differ, so the two members should compute on the same kind.
 * Buffers such as BatchNorm's means: every pass starts from the values at the beginning of the
   step, and the step adds the mean of the changes of its microbatches, as replicas of a pipeline
   do. So the result does not depend on the order, and the repeated pass changes nothing.
 * Sums are in float64 where the device has it. The order of `fold` then matters only where a
   float64 sum is rounded: the float32 mean is the same in nearly all cases, not in every case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.codec.seeds import mixed
from atoll.devices.choose import CPU
from atoll.devices.facts import has_float64
from atoll.errors import LossNotFinite, PeerRefused
from atoll.strategies.inner.pipeline.cuts import as_tuple
from atoll.strategies.inner.precision import widened
from atoll.strategies.inner.swarm.stage import ModelStage
from atoll.strategies.inner.swarm.sums import Held, OlderWeights, Pending, Sums, check_gradients
from atoll.strategies.vectors.flat import real_view

Gradients = tuple[Tensor | None, ...]
"""One per tensor between two stages; None for a tensor without gradient, e.g. of integers."""


@dataclass(frozen=True, slots=True, order=True)
class MicrobatchKey:
    """Names one lease of a microbatch; its rows are a pure function of step and index."""

    step: int
    index: int
    lease: int = 0


class StepSum(NamedTuple):
    """What a member has folded in a step."""

    rows: int
    loss: float
    """Mean loss over these rows; 0 except on the last stage."""


class StageRunner:
    """Computes one stage; for one thread. See the module's docstring."""

    def __init__(self, stage: ModelStage, *, seed: int, most: int = 64, early: int = 0) -> None:
        """Start with step 0; `most` microbatches are held at a time, see `takes` for `early`."""
        self.stage, self._seed, self._most, self.early = stage, seed, most, early
        self._older: OlderWeights | None = None
        modules = list(stage.module.modules())
        # Such a layer would overwrite the inputs, which the backward pass needs again.
        self._overwrites = any(getattr(module, "inplace", False) for module in modules)
        self._parameters = list(stage.parameters().values())
        self._buffers = list(stage.buffers().values())
        frozen = {id(parameter) for parameter in stage.module.parameters()}
        self._counts = [b for b in stage.untrained().values() if id(b) not in frozen]
        self._sum_type = torch.float64 if has_float64(stage.device) else torch.float32
        self._held: dict[MicrobatchKey, Held] = {}
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start a step: forget all that is held, and take the current values of the buffers."""
        self._held.clear()
        self._sums = self._none()
        self._ahead: Sums | None = None
        self._enter(step)

    def go_on(self) -> None:
        """Start the next step with what is already held and folded for it, after :meth:`keep`."""
        self._held = {key: held for key, held in self._held.items() if key.step > self.step}
        self._sums, self._ahead = self._ahead or self._none(), None
        self._enter(self.step + 1)

    def keep(self) -> None:
        """Keep the current weights for early microbatches, before the optimizer's step."""
        if self.early and self._older is None:
            self._older = OlderWeights(self.stage, self._parameters, self._all_buffers)
        if self._older is not None:
            self._older.renew(self._parameters, self._before)

    def _enter(self, step: int) -> None:
        self.step = step
        self._before = [b.detach().clone() for b in (*self._buffers, *self._counts)]

    def _none(self) -> Sums:
        return Sums.over(self._parameters, self._buffers, self._sum_type)

    def older(self) -> dict[str, Tensor]:
        """Return the older parameters and buffers by their names in the whole model, if any."""
        return {} if self._older is None else self._older.tensors()

    def load_older(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`older` returned; if that is empty, the current weights are used."""
        if tensors:
            self.keep()
            for name, tensor in self.older().items():
                tensor.copy_(tensors.get(name, tensor))

    def takes(self, step: int, index: int) -> bool:
        """Return whether it has the weights on which this microbatch is computed.

        For the first `early` ones of a step they are those of the step before.
        """
        return step == self.step or (step == self.step + 1 and index < self.early)

    @property
    def _all_buffers(self) -> tuple[Tensor, ...]:
        return (*self._buffers, *self._counts)

    def _version(self, key: MicrobatchKey) -> OlderWeights | None:
        """Return the older weights if this microbatch is computed on them."""
        return self._older if key.step == self.step and key.index < self.early else None

    def steady_buffers(self) -> dict[str, Tensor]:
        """Return the values of all saved buffers at the beginning of the step, by name.

        Unlike the buffers themselves they do not change during a pass: other threads may read them.
        """
        values = {id(b): old for b, old in zip(self._all_buffers, self._before, strict=True)}
        named = {**self.stage.buffers(), **self.stage.untrained()}
        return {name: values.get(id(buffer), buffer) for name, buffer in named.items()}

    @property
    def held(self) -> tuple[MicrobatchKey, ...]:
        """The microbatches that are neither folded nor dropped."""
        return tuple(self._held)

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the tensors in the vector of :meth:`gradient`."""
        return [t.shape for t in (*self._parameters, *map(real_view, self._buffers))]

    @property
    def held_bytes(self) -> int:
        """Bytes of kept inputs and pending gradients."""
        found: list[Tensor | None] = []
        for held in self._held.values():
            found += held.inputs
            if held.pending is not None:
                found += [*held.pending.gradients, *held.pending.changes, *held.pending.counts]
        return sum(tensor.nbytes for tensor in found if tensor is not None)

    # ------------------------------------------------------------------------ passes

    @torch.no_grad()
    def forward(self, key: MicrobatchKey, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Keep the inputs, (rows, ...) each, and return the outputs; not for the last stage.

        Raises:
            PeerRefused: it is of another step, or too much is held, or the inputs do not fit.
        """
        kept = self._keep(key, inputs)
        with self._pass(key):
            return self._outputs(key, kept)

    def backward(
        self,
        key: MicrobatchKey,
        gradients: Sequence[Tensor | None],
        *,
        inputs: Sequence[Tensor] | None = None,
        counted: bool = True,
    ) -> Gradients:
        """Repeat the forward pass, and return the gradients of the inputs.

        Args:
            key: Names the microbatch.
            gradients: Of the mean loss of the microbatch, one per output.
            inputs: Of the stage, if another member did the forward pass.
            counted: Whether the gradients of the parameters become pending.

        Raises:
            PeerRefused: nothing is held under this key, or the gradients do not fit the outputs.
        """
        kept = self._keep(key, inputs) if inputs is not None else self._kept(key)
        leaves = self._leaves(kept)
        with self._pass(key), torch.enable_grad():
            outputs = self._outputs(key, leaves)
            check_gradients(outputs, gradients)
            pairs = [
                (output, gradient.to(output))
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None
            ]
            return self._pull(key, leaves, pairs, counted=counted)

    def loss(
        self, key: MicrobatchKey, inputs: Sequence[Tensor], targets: Tensor, *, counted: bool = True
    ) -> tuple[float, Gradients]:
        """Compute both passes of the last stage; return the mean loss and the inputs' gradients.

        Raises:
            LossNotFinite: the loss is not finite.
            PeerRefused: as :meth:`forward`.
        """
        criterion = self.stage.criterion
        if criterion is None:
            raise ValueError(f"stage {self.stage.number} is not the last one")
        leaves = self._leaves(self._keep(key, inputs))
        with self._pass(key), torch.enable_grad():
            outputs = self._outputs(key, leaves)
            outputs = tuple(widened(output, self.stage.cut.precision) for output in outputs)
            whole = outputs[0] if len(outputs) == 1 else outputs
            loss = criterion(whole, targets.to(self.stage.device))
            value = loss.item()
            if not math.isfinite(value):
                self.drop(key)
                raise LossNotFinite(
                    "the loss of a microbatch is not finite; it was dropped",
                    given=f"step {key.step}, microbatch {key.index}, loss {value}",
                    expected="a finite number",
                    remedy="lower the learning rate, or warm up longer",
                )
            pairs = [(loss, torch.ones_like(loss))]
            return value, self._pull(key, leaves, pairs, counted=counted, loss=value)

    def _outputs(self, key: MicrobatchKey, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self._overwrites:
            values = [value.clone() for value in values]
        older = self._version(key)
        if older is not None:
            return as_tuple(older.outputs(self.stage.module, values))
        return as_tuple(self.stage.module(*values))

    def _pull(
        self,
        key: MicrobatchKey,
        leaves: Sequence[Tensor],
        pairs: Sequence[tuple[Tensor, Tensor]],
        *,
        counted: bool,
        loss: float = 0.0,
    ) -> Gradients:
        """Return the gradients of the leaves; those of the parameters become pending."""
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        older = self._version(key)
        trained: Sequence[Tensor] = self._parameters if older is None else older.parameters
        before = self._before if older is None else older.buffers
        sources = [*wanted, *(trained if counted else ())]
        pairs = [pair for pair in pairs if pair[0].requires_grad]
        found: tuple[Tensor | None, ...] = (None,) * len(sources)
        if pairs and sources:
            ends, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, sources, given, allow_unused=True)
        if counted:
            self._held[key].pending = Pending(
                [None if g is None else g.detach() for g in found[len(wanted) :]],
                [real_view(b - a) for b, a in zip(self._buffers, before, strict=False)],
                [count.clone() for count in self._counts],
                len(leaves[0]), loss,
            )  # fmt: skip
        back = iter(found)
        return tuple(next(back) if leaf.requires_grad else None for leaf in leaves)

    @contextmanager
    def _pass(self, key: MicrobatchKey) -> Iterator[None]:
        """Surround a pass: the microbatch's random state, and buffers as the step found them."""
        device = self.stage.device
        devices = [] if device.type == CPU else [device]
        with torch.random.fork_rng(devices=devices, device_type=device.type):
            torch.manual_seed(mixed("swarm", self._seed, key.step, key.index, self.stage.number))
            older = self._version(key)
            if older is not None:
                self._set_buffers(older.buffers)
            try:
                yield
            finally:
                self._set_buffers(self._before)

    @torch.no_grad()
    def _set_buffers(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._all_buffers, values, strict=True):
            buffer.copy_(value)

    def _leaves(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t.detach().requires_grad_(t.is_floating_point()) for t in inputs)

    def _keep(self, key: MicrobatchKey, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not self.takes(key.step, key.index):
            raise PeerRefused(
                "this microbatch is of another step", given=key.step, expected=f"step {self.step}"
            )
        if key not in self._held and len(self._held) >= self._most:
            raise PeerRefused(
                f"stage {self.stage.number} holds as many microbatches as it may",
                given=len(self._held), expected=f"fewer than {self._most}",
                remedy="send it to another member of the stage, or later",
            )  # fmt: skip
        kept = tuple(value.detach().to(self.stage.device) for value in inputs)
        counts = {len(value) if value.dim() else 0 for value in kept}
        if len(counts) != 1 or 0 in counts:
            raise PeerRefused(
                "the inputs of a microbatch have no rows, or not the same number",
                given=" and ".join(str(tuple(value.shape)) for value in kept) or "no tensor",
            )
        self._held[key] = Held(kept)
        return kept

    def _kept(self, key: MicrobatchKey) -> tuple[Tensor, ...]:
        held = self._held.get(key)
        if held is None or not held.inputs:
            raise PeerRefused(
                "this member does not hold the microbatch",
                given=f"step {key.step}, microbatch {key.index}",
                expected="its inputs, too",
            )
        return held.inputs

    def inputs(self, key: MicrobatchKey) -> tuple[Tensor, ...]:
        """Return the kept inputs, to send them to another member; raises PeerRefused."""
        return self._kept(key)

    def release(self, key: MicrobatchKey) -> None:
        """Free the inputs, which no pass needs any more; pending gradients stay."""
        held = self._held.get(key)
        if held is not None and held.pending is not None:
            held.inputs = ()
        else:
            self.drop(key)

    def drop(self, key: MicrobatchKey) -> None:
        """Forget a microbatch without counting it."""
        self._held.pop(key, None)

    def drop_pending(self, key: MicrobatchKey) -> None:
        """Forget the pending gradients; the inputs stay, for another stage that needs them."""
        held = self._held.get(key)
        if held is not None:
            held.pending = None
            if not held.inputs:
                self.drop(key)

    @torch.no_grad()
    def fold(self, key: MicrobatchKey) -> None:
        """Count a microbatch: add its pending gradients to the step's sums, times its rows.

        Raises:
            PeerRefused: it has no pending gradients here.
        """
        held = self._held.get(key)
        if held is None or held.pending is None:
            raise PeerRefused(
                "a microbatch is to be counted that has no pending gradients here",
                given=f"step {key.step}, microbatch {key.index}, stage {self.stage.number}",
            )
        pending = held.pending
        self.drop_pending(key)
        sums = self._sums
        if key.step > self.step:
            sums = self._ahead = self._ahead or self._none()
        sums.fold(pending, early=key.index < self.early)

    @torch.no_grad()
    def add(self, mean: Tensor, total: StepSum) -> None:
        """Add what another member has folded, a mean of :meth:`gradient` over so many rows."""
        self._sums.add(mean, rows=total.rows, loss=total.loss)

    @torch.no_grad()
    def gradient(self) -> tuple[Tensor, StepSum]:
        """Return the mean over the folded microbatches as a float32 vector in main memory.

        It holds the gradients in the order of the parameters, then the changes of the buffers; the
        members of a stage average it with the rows as weights. Without a row it is zero.
        """
        sums = self._sums
        return sums.mean(), StepSum(sums.rows, sums.loss / max(1, sums.rows))

    @torch.no_grad()
    def apply(self, mean: Tensor) -> None:
        """Write a mean of :meth:`gradient` into `grad`, and the new values into the buffers.

        Then the caller steps the optimizer and begins the next step.
        """
        sums = self._sums
        sizes = [total.numel() for total in (*sums.gradients, *sums.changes)]
        parts = list(torch.split(mean, sizes))
        for parameter in self._parameters:
            parameter.grad = parts.pop(0).view(parameter.shape).to(parameter)
        for buffer, before in zip(self._buffers, self._before, strict=False):
            now, change = real_view(buffer), parts.pop(0)
            now.copy_(real_view(before) + change.view(now.shape).to(now))
        for count, value in zip(self._counts, sums.counts, strict=False):
            count.copy_(value)
