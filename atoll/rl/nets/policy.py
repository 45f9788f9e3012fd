"""The network of a policy, which also normalizes observations.

It consists of tanh layers, initialised orthogonally, and an optional recurrent cell (GRU). It takes
observations as the environment returns them and normalizes them by running statistics that only its
learner updates: between two updates a policy is a fixed function.

Batches are merged into the statistics by the pairwise formula of Chan, Golub and LeVeque, in double
precision, so the result does not depend on how observations were batched, within rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.config.rl_tables import RlTable
from atoll.rl.environments.spaces import CONTINUOUS, TaskSpec
from atoll.rl.nets.distributions import Distribution, distribution, outputs

if TYPE_CHECKING:
    from atoll.rl.trajectory import Trajectory


CLIP = 10.0
"""Largest absolute value of a normalized observation."""
EPSILON = 1e-8
"""Added to the variance, which is 0 for a constant observation."""


class RunningNorm(nn.Module):
    """Normalizes observations of one shape by their running mean and deviation."""

    mean: Tensor
    """[*shape], float64."""
    variance: Tensor
    """[*shape], float64; the biased one."""
    count: Tensor
    """Scalar, float64: number of observations; at 0 they are only clipped."""
    _shift: Tensor
    _deviation: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # Derived for `forward`, which runs at every step of an environment.
        self.register_buffer("_shift", torch.zeros(shape), persistent=False)
        self.register_buffer("_deviation", torch.ones(shape), persistent=False)
        self.register_load_state_dict_post_hook(_refresh)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, observations: Tensor) -> None:
        """Add observations to the statistics.

        They are [..., *shape], not normalized, all finite.
        """
        batch = observations.to(torch.float64).reshape(-1, *self.mean.shape)
        if not len(batch):
            return
        mean, variance = batch.mean(0), batch.var(0, unbiased=False)
        total = self.count + len(batch)
        share, change = len(batch) / total, mean - self.mean
        self.variance.lerp_(variance, share).add_(change.square() * share * (1.0 - share))
        self.mean.add_(change * share)
        self.count.copy_(total)
        _refresh(self)

    def forward(self, observations: Tensor) -> Tensor:
        """Return observations [..., *shape] normalized, float32."""
        return normalised(observations, self._shift, self._deviation)

    def scale(self) -> tuple[Tensor, Tensor]:
        """Return copies of mean and deviation, each [*shape], float32.

        `normalised` with them keeps returning what `forward` returns now.
        """
        return self._shift.clone(), self._deviation.clone()


def normalised(observations: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return observations [..., *shape] with mean 0 and deviation 1, clipped, float32."""
    return observations.float().sub(mean).div_(deviation).clamp_(-CLIP, CLIP)


@torch.no_grad()
def _refresh(norm: nn.Module, _: Any = None) -> None:
    """Derive the buffers of `forward` from the saved ones."""
    assert isinstance(norm, RunningNorm)
    if norm.count == 0:
        norm._shift.zero_()
        norm._deviation.fill_(1.0)
        return
    norm._shift.copy_(norm.mean)
    norm._deviation.copy_((norm.variance + EPSILON).sqrt())


HIDDEN_GAIN, HEAD_GAIN = math.sqrt(2.0), 0.01
"""Gains of the orthogonal initialisation: the small one makes the initial policy near uniform."""


@dataclass(slots=True)
class Acted:
    """A policy's actions in a batch of states."""

    actions: Tensor
    """[B, width]."""
    log_probabilities: Tensor
    """[B]."""
    hidden: Tensor | None
    """[B, H], the next recurrent state; None if the policy is not recurrent."""


class Policy(nn.Module):
    """π(a | s), for any space of actions."""

    def __init__(
        self,
        task: TaskSpec,
        *,
        hidden: Iterable[int] = (64, 64),
        recurrent: int = 0,
        norm: RunningNorm | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Build the network of a task.

        `recurrent` is the width of the GRU, 0 for none; without `norm` observations stay unchanged.
        """
        super().__init__()
        self.actions, self.recurrent = task.actions, recurrent
        self.norm = norm
        self._dimensions = len(task.observation)
        widths = [math.prod(task.observation), *hidden]
        self._layers = [
            linear(a, b, gain=HIDDEN_GAIN, generator=generator)
            for a, b in itertools.pairwise(widths)
        ]
        self.body = nn.ModuleList(self._layers)
        self.cell = gru_cell(widths[-1], recurrent, generator=generator) if recurrent else None
        last = recurrent or widths[-1]
        self.head = linear(last, outputs(task.actions), gain=HEAD_GAIN, generator=generator)
        continuous = task.actions.kind == CONTINUOUS
        self.log_deviation = nn.Parameter(torch.zeros(task.actions.width)) if continuous else None

    @classmethod
    def build(cls, task: TaskSpec, rl: RlTable, *, generator: torch.Generator) -> Policy:
        """Return the policy that a job file specifies."""
        norm = RunningNorm(task.observation) if rl.normalise else None
        return cls(task, hidden=rl.hidden, recurrent=rl.recurrent, norm=norm, generator=generator)

    @property
    def device(self) -> torch.device:
        """The device that computes; observations may be in main memory."""
        return self.head.weight.device

    # ------------------------------------------------------------------------------- acting

    def initial(self, columns: int) -> Tensor | None:
        """Return the initial recurrent state, [B, H]; None if the policy is not recurrent."""
        if not self.recurrent:
            return None
        return torch.zeros(columns, self.recurrent, device=self.device)

    def forget(self, hidden: Tensor | None, ended: Tensor) -> Tensor | None:
        """Return the recurrent state, reset in the columns whose episode ended ([B], bool)."""
        return hidden if hidden is None else hidden * (~ended).unsqueeze(-1).to(hidden.device)

    @torch.inference_mode()
    def act(
        self,
        observations: Tensor,
        hidden: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        greedy: bool = False,
    ) -> Acted:
        """Return actions for a batch of states, in main memory.

        `hidden` is [B, H] for a recurrent policy; `greedy` takes the most probable actions.
        """
        output, hidden = self.put_out(observations, hidden)
        deviation = None if self.log_deviation is None else self.log_deviation.cpu()
        chances = distribution(self.actions, output.cpu(), deviation)
        actions = chances.mode() if greedy else chances.sample(generator)
        return Acted(actions, chances.log_probability(actions), hidden)

    def put_out(
        self, observations: Tensor, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the input of `distribution` for each state, [B, outputs], and the recurrent state.

        For callers that draw actions themselves, in inference mode.
        """
        features = self._body(self.prepared(observations.to(self.device)))
        if self.cell is not None:
            before = None if hidden is None else hidden.to(self.device)
            hidden = features = self.cell(features, before)
        return functional.linear(features, self.head.weight, self.head.bias), hidden

    # ---------------------------------------------------------------------------- evaluating

    def evaluate(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        """Return ln π of the trajectory's actions, and the entropy at each step, both [T, B]."""
        chances = self.over(
            self.prepared(trajectory.observations[:-1]), trajectory.hidden, trajectory.ended
        )
        return chances.log_probability(trajectory.actions), chances.entropy()

    def prepared(self, observations: Tensor) -> Tensor:
        """Return observations [..., *shape] normalized and flat."""
        # Not `self.norm(...)`: its lookup of hooks costs 4 us at every step of a collector.
        normalised = observations if self.norm is None else self.norm.forward(observations)
        return normalised if self._dimensions == 1 else normalised.flatten(-self._dimensions)

    def over(
        self, prepared: Tensor, hidden: Tensor | None = None, ended: Tensor | None = None
    ) -> Distribution:
        """Return the distribution in each state.

        Args:
            prepared: Result of `prepared`, [..., width]; for a recurrent policy [T, B, width].
            hidden: [B, H] before the first step, for a recurrent policy.
            ended: [T, B] bool: the recurrent state is reset after these steps.
        """
        features = self._body(prepared)
        if self.cell is not None:
            features = self._remembering(features, hidden, ended)
        output = functional.linear(features, self.head.weight, self.head.bias)
        return distribution(self.actions, output, self.log_deviation)

    def _body(self, inputs: Tensor) -> Tensor:
        for layer in self._layers:
            inputs = torch.tanh(functional.linear(inputs, layer.weight, layer.bias))
        return inputs

    def _remembering(self, features: Tensor, hidden: Tensor | None, ended: Tensor | None) -> Tensor:
        """Run the cell over the steps, [T, B, width] to [T, B, H]."""
        assert self.cell is not None
        memory = hidden if hidden is not None else self.initial(features.shape[1])
        goes_on = None if ended is None else (~ended).unsqueeze(-1)
        found = []
        for step, inputs in enumerate(features.unbind(0)):
            memory = self.cell(inputs, memory)
            found.append(memory)
            if goes_on is not None:
                memory = memory * goes_on[step]
        return torch.stack(found)


def linear(
    inputs: int, width: int, *, gain: float, generator: torch.Generator | None = None
) -> nn.Linear:
    """Return a layer with orthogonal weights and zero bias; torch's own generator is not used."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, width)  # type: ignore[no-untyped-call]
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def gru_cell(inputs: int, width: int, *, generator: torch.Generator | None = None) -> nn.GRUCell:
    """Return a GRU cell with orthogonal weights and zero bias."""
    cell: nn.GRUCell = nn.utils.skip_init(nn.GRUCell, inputs, width)  # type: ignore[no-untyped-call]
    for weight in (cell.weight_ih, cell.weight_hh):
        nn.init.orthogonal_(weight, generator=generator)
    for bias in (cell.bias_ih, cell.bias_hh):
        nn.init.zeros_(bias)
    return cell
