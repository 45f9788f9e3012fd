"""NoLoCo: DiLoCo with the outer step taken in random pairs, without any all-reduce.

Kolehmainen et al. 2025, "NoLoCo: No-all-reduce Low Communication Training Method for Large Models"
(https://arxiv.org/abs/2506.10911). Legend: phi_i the slow parameters of member i, theta_i its fast
ones after H = `every` local steps, Delta_i = phi_i - theta_i, delta_i its outer momentum, j the
members of its pair (n = 2, itself included), alpha = `outer_momentum`, beta = `outer_lr`,
gamma = `pull`.

    delta_i = alpha delta_i - beta/n sum_j Delta_j - gamma (phi_i - 1/n sum_j phi_j)
    phi_i   = phi_i + delta_i ; theta_i = phi_i

The last term pulls the slow parameters of a pair together. Between two members that always meet,
their distance d follows d(t+1) = (1 + alpha - gamma) d(t) - alpha d(t-1), which shrinks for
gamma < 2 (1 + alpha).

Differs from the paper:
  * the equations follow the paper's text and were not compared with the authors' code;
  * activations are not re-routed: there is no pipeline;
  * a member without a partner (odd number of members, or a loss) takes its own outer step (n = 1);
  * floating-point buffers become the mean of the pair;
  * at the end every member gets the mean of all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.errors import ConfigError
from atoll.group.run_round import Exchange
from atoll.methods.decentralized import NoLoCo
from atoll.strategies.base import SyncResult, Traffic
from atoll.strategies.graphs import pairs
from atoll.strategies.outer.decentralized import DecentralizedOuter
from atoll.strategies.rounds.all_to_all import AllToAllVectors
from atoll.strategies.traffic import all_to_all_volume
from atoll.strategies.vectors.flat import length, pseudo_gradient
from atoll.task import Task
from atoll.wire.messages import RoundPlan

DELTA, SLOW = "delta", "slow"
"""Keys of the codec's residuals: of the parameter change, and of the slow parameters."""

OWN_SLOW, OWN_MOMENTUM = "own.slow", "own.momentum"


@dataclass(frozen=True, slots=True)
class Paired:
    """The result of a round for one member."""

    delta: Tensor
    """Mean over its pair of the change since the last round."""
    away: Tensor
    """Difference of its slow parameters to the pair's mean."""
    alone: bool
    """It had no partner."""
    contributors: tuple[str, ...]
    weight: float
    digest: str


class NoLoCoOuter(DecentralizedOuter):
    """See the module's docstring."""

    def __init__(self, options: NoLoCo, *, clock: Clock | None = None) -> None:
        """Check the options."""
        super().__init__(every=options.every, clock=clock)
        if not options.outer_lr > 0:
            raise ConfigError(
                "outer_lr is out of range", given=options.outer_lr, expected="above 0"
            )
        if not 0 <= options.outer_momentum < 1:
            raise ConfigError(
                "outer_momentum is out of range", given=options.outer_momentum,
                expected="0 to below 1",
            )  # fmt: skip
        most = 2 * (1 + options.outer_momentum)
        if not 0 <= options.pull < most:
            raise ConfigError(
                "a pull this strong makes pairs diverge", given=f"pull {options.pull}",
                expected=f"0 to below 2 (1 + outer_momentum) = {most:g}",
            )  # fmt: skip
        self.options = options

    @property
    def _is_plain(self) -> bool:
        return self.options.outer_lr == 1.0 and self.options.outer_momentum == 0.0

    def _stand(self, task: Task) -> None:
        self._slow = self._flat.read()
        self._momentum = torch.zeros(self._num_parameters, device=self._slow.device)

    def _round(self, task: Task) -> SyncResult:
        entered = self._clock.monotonic()
        delta = pseudo_gradient(self._slow, self._flat.read(self._scratch), out=self._scratch)
        norm = self._check(delta, task)
        number, prepare_s = task.round, self._clock.monotonic() - entered
        try:
            agreed = self._round_client.run(
                task, self._exchange(task, delta), base=self._base, norm=norm
            )
        except BaseException:
            self._all_to_all.finish(committed=False)
            raise
        began = self._clock.monotonic()
        paired = agreed.reduced
        self._all_to_all.finish(committed=self._group.me in paired.contributors)
        moved = self._apply(paired)
        self._advance(task, paired.digest)
        apply_s = self._clock.monotonic() - began
        self._round_client.note_applied(apply_s)
        return SyncResult(
            round=number, contributors=paired.contributors, weight=paired.weight,
            seconds={**agreed.seconds, "prepare": prepare_s, "apply": apply_s},
            sent_bytes=agreed.sent_bytes, received_bytes=agreed.received_bytes, delta_norm=moved,
            digest=self._base, aborted=agreed.attempts - 1,
        )  # fmt: skip

    def _exchange(self, task: Task, delta: Tensor) -> Exchange[Paired]:
        """Return the exchange of this member's change and slow parameters with its partner."""

        def exchange(plan: RoundPlan) -> Paired:
            members = plan.members
            partner = members[pairs(len(members), round_=plan.round)[members.index(self._group.me)]]
            got = self._all_to_all.exchange(
                plan, {DELTA: delta, SLOW: self._slow},
                to=[partner] if partner != self._group.me else [], weight=1.0,
                resting=task.state_lock.resting,
            )  # fmt: skip
            return self._paired(got, partner)

        return exchange

    def _paired(self, got: AllToAllVectors, partner: str) -> Paired:
        facts = tuple(got.weights), sum(got.weights.values()), got.digest
        theirs, own = got.others.get(partner), got.own
        if theirs is None:
            return Paired(own[DELTA], torch.zeros_like(own[SLOW]), True, *facts)
        delta = (own[DELTA] + theirs[DELTA]).div_(2)
        away = (own[SLOW] - theirs[SLOW]).div_(2)
        return Paired(delta, away, False, *facts)

    def _apply(self, paired: Paired) -> float:
        """Take the outer step and return its norm."""
        trained, rest = slice(0, self._num_parameters), slice(self._num_parameters, None)
        before = self._slow.clone()
        if paired.alone and self._is_plain:
            # phi - (phi - theta) need not be theta to the last bit; one member is to train
            # exactly as without Atoll.
            self._flat.read(self._slow)
        else:
            options, momentum = self.options, self._momentum
            momentum.mul_(options.outer_momentum)
            momentum.sub_(paired.delta[trained], alpha=options.outer_lr)
            momentum.sub_(paired.away[trained], alpha=options.pull)
            self._slow[trained].add_(momentum)
            self._slow[rest].sub_(paired.away[rest]).sub_(paired.delta[rest])
            self._flat.write(self._slow)
        return length(before.sub_(self._slow))

    # ----------------------------------------------------------------------------- state

    def rejoin(self, task: Task) -> None:
        """Continue from the slow parameters, or from this member's saved state."""
        if not self._resumed:
            self._flat.write(self._slow)
        super().rejoin(task)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the decentralized state, the slow parameters and the momentum."""
        return super().state_dict() | {OWN_SLOW: self._slow, OWN_MOMENTUM: self._momentum}

    def shared_state(self) -> dict[str, Tensor]:
        """Return the state that a joining member copies from its donor."""
        own = {OWN_SLOW: self._slow, OWN_MOMENTUM: self._momentum}
        return super().shared_state() | own

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: it belongs to another model.
        """
        super().load_state_dict(state)
        if OWN_SLOW not in state:  # a member that a checkpoint does not know begins at its model
            self._slow = self._flat.read()
            self._momentum.zero_()
            return
        if state[OWN_SLOW].shape != self._slow.shape:
            raise ConfigError(
                "this state belongs to another model",
                given=f"{state[OWN_SLOW].numel()} elements", expected=f"{self._slow.numel()}",
            )  # fmt: skip
        self._slow.copy_(state[OWN_SLOW])
        self._momentum.copy_(state[OWN_MOMENTUM])

    def _round_volume(self, elements: int, peers: int, *, round_: int, rank: int) -> Traffic:
        if pairs(peers, round_=round_)[rank] == rank:
            return all_to_all_volume([], [])
        nbytes = self._codec.nbytes(elements)
        return all_to_all_volume([(nbytes, 1)] * 2, [nbytes] * 2)
