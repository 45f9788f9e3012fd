"""DES-LOC: Local Adam that averages parameters and moments, each at its own period.

Iacob et al. 2025, "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
Models" (https://arxiv.org/abs/2505.22549), Algorithm 1. Legend: x parameters, u and v the first and
second moment, K_x = `every`, K_u = `momentum_rounds` K_x, K_v = `variance_rounds` K_x.

    every member: steps of Adam on its own shard
    x = mean(x_i) every K_x steps ;  u = mean(u_i) every K_u ;  v = mean(v_i) every K_v

Members' copies of a moment drift apart at a rate given by its half-life. v hardly changes, so that
few averages suffice, which also level out the moments of members that joined. With all periods
equal it is Local Adam with averaged moments, without any moment Local SGD with Adam inside.

Differs from the paper:
  * averages are taken after a step and not between gradient and step, so that gradients are those
    of the averaged parameters and members are equal after a round;
  * periods of moments are whole numbers of rounds;
  * moments travel in bf16 or fp32 whatever the codec is: steps divide by the root of a variance,
    which may not be rounded to zero;
  * a joining member takes over the moments of their last average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.digest import Digest
from atoll.errors import ConfigError, PeerLost
from atoll.group.base import Group, Reduced
from atoll.methods.local_moments import DesLoc
from atoll.strategies.base import Traffic
from atoll.strategies.outer.periodic import PeriodicOuter
from atoll.strategies.traffic import times, total, volume
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task

MOMENT_CODECS = ("bf16", "fp32")
"""Codecs that round no small number to zero."""

MEAN, VARIANCE = "exp_avg", "exp_avg_sq"
"""Adam's moments, as torch names them."""

VARIANTS = ("amsgrad", "maximize")
"""Options of Adam with other moments, or other steps."""

_SHARED = "shared.moment."


class DesLocOuter(PeriodicOuter):
    """Periodic averages of parameters and moments; see the module's docstring."""

    def __init__(self, options: DesLoc) -> None:
        """Check the options."""
        super().__init__(weight=options.weight)
        least = {"every": 1, "momentum_rounds": 0, "variance_rounds": 0}
        for name, smallest in least.items():
            if getattr(options, name) < smallest:
                raise ConfigError(
                    f"{name} is too small", given=getattr(options, name),
                    expected=f"{smallest} or more",
                )  # fmt: skip
        if options.moments not in MOMENT_CODECS:
            raise ConfigError(
                "this codec cannot be used for moments", given=f"moments = {options.moments!r}",
                expected=f"one of {', '.join(MOMENT_CODECS)}",
            )  # fmt: skip
        self.options = options
        self._moments_codec = make_codec(options.moments)
        self._averaged: dict[str, Tensor] = {}
        """The moments as they were last averaged."""
        self._found: dict[str, Tensor] = {}
        """Averages of the round under way, which may be repeated."""

    def periods(self) -> dict[str, int]:
        """Return how many rounds lie between two averages of each moment; 0: none."""
        return {MEAN: self.options.momentum_rounds, VARIANCE: self.options.variance_rounds}

    def next_due(self, step: int) -> int:
        """Return the next multiple of `every`."""
        return (step // self.options.every + 1) * self.options.every

    def is_plain(self, step: int) -> bool:
        """Return True: the mean is taken as it is."""
        return True

    def update(self, start: Tensor, mean: Tensor, *, step: int) -> None:
        """Move to the mean of the members' parameters."""
        start.sub_(mean)

    # ------------------------------------------------------------------------- moments

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as the common state.

        Raises:
            ConfigError: the inner optimizer is not Adam.
        """
        fits = isinstance(task.optimizer, torch.optim.Adam)  # AdamW is one as well
        used = [name for name in VARIANTS if any(g.get(name) for g in task.optimizer.param_groups)]
        if not fits or used:
            raise ConfigError(
                f"{self.options.name} averages the moments of Adam",
                given=type(task.optimizer).__name__ + "".join(f" with {name}" for name in used),
                expected="torch.optim.Adam or AdamW without variants",
                remedy='optimizer = "adamw" in [train]; any other: preset = "local-sgd"',
            )  # fmt: skip
        super().setup(task, group=group, codec=codec)
        self._averaged = {}  # those of an earlier setup have the length of its parameters

    def _due(self, step: int) -> list[str]:
        """Return the moments that the round at a step averages."""
        rounds, rest = divmod(step, self.options.every)
        if rest:
            return []
        return [name for name, period in self.periods().items() if period and not rounds % period]

    def _moment(self, task: Task, name: str) -> Flat:
        """Return a moment of all trained parameters; zeros where there is none yet."""
        return Flat([state[name] for state in _states(task, name)])

    def exchange_beside(self, task: Task, found: Reduced, weight: float) -> Reduced:
        """Average the moments that are due, in the same round."""
        self._found = {}
        digests, sent, received = [found.digest], found.sent_bytes, found.received_bytes
        for name in self._due(task.step):
            work = self._round_client.group.reduce(
                [self._moment(task, name).read()], codec=self._moments_codec, weight=weight,
                key=name,
            )  # fmt: skip
            with task.state_lock.resting():
                beside = work.wait()
            if beside.contributors != found.contributors:
                raise PeerLost("a member was lost between the parts of a round")
            self._found[name] = beside.tensors[0]
            digests.append(beside.digest)
            sent, received = sent + beside.sent_bytes, received + beside.received_bytes
        if not self._found:
            return found
        whole = Digest(" ".join(digests).encode()).hexdigest()
        return replace(found, digest=whole, sent_bytes=sent, received_bytes=received)

    def _apply(self, task: Task, mean: Tensor, *, alone: bool) -> None:
        """Take over the averages of parameters and moments."""
        super()._apply(task, mean, alone=alone)
        for name, vector in self._found.items():
            if not alone:
                self._moment(task, name).write(vector)
            self._averaged[name] = vector
        self._found = {}

    def rejoin(self, task: Task) -> None:
        """Load the common state; a member without moments of its own takes the averaged ones."""
        if not self._resumed:
            for name, vector in self._averaged.items():
                self._moment(task, name).write(vector)
        super().rejoin(task)

    # --------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the common state with the averaged moments."""
        moments = {_SHARED + name: vector for name, vector in self._averaged.items()}
        return super().state_dict() | moments

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(state)
        self._averaged = {
            key.removeprefix(_SHARED): value.clone()
            for key, value in state.items()
            if key.startswith(_SHARED)
        }

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        buffers = 0
        if elements == self._flat.num_elements:
            buffers = elements - self._num_parameters
        each = volume(self._moments_codec, elements - buffers, peers, rank=rank)
        rounds = range(self.options.every, steps + 1, self.options.every)
        count = sum(len(self._due(step)) for step in rounds)
        plain = super().traffic(elements, peers, steps=steps, rank=rank)
        return total([plain, replace(times(each, count), rounds=0)])


def _states(task: Task, name: str) -> Iterator[dict[str, Any]]:
    """Yield the optimizer's state of every trained parameter; made if it took no step yet."""
    groups = {id(p): group for group in task.optimizer.param_groups for p in group["params"]}
    for parameter in task.parameters():
        state = task.optimizer.state[parameter]
        if "step" not in state:
            group = groups.get(id(parameter), {})
            beside = group.get("fused") or group.get("capturable")
            place = parameter.device if beside else torch.device("cpu")
            state["step"] = torch.tensor(float(task.step), dtype=torch.float32, device=place)
            state |= {moment: torch.zeros_like(parameter) for moment in (MEAN, VARIANCE)}
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        yield state
