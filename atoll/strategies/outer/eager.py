"""Eager DiLoCo: a round overlaps the whole next period, and each member applies its share early.

Kale et al. 2025, "Eager Updates For Overlapped Communication and Computation in DiLoCo"
(https://arxiv.org/abs/2502.12996). Legend: Delta_i^t a member's pseudo-gradient of period t, avg^t
the mean over all members, s_i the member's share of it (1/M with equal weights), H = `every`.

    at the end of period t:  begin to average Delta_i^t, take the result of avg^(t-1)
    theta_i = OuterSGD_i(theta_i, avg^(t-1) + s_i Delta_i^t - s_i Delta_i^(t-1))

Every pseudo-gradient counts once: a member applies its own share at once and the others' a period
later. Members therefore have different parameters between rounds, and agree on the sequence of
means. The common parameters are OuterSGD over avg^1, avg^2, ..., one period behind. Evaluation,
checkpoints and joining members use them, and all members end with them.

Differs from the paper:
  * contributions weigh by the tokens they were trained on, unless `weight = "equal"`; the share
    applied early is that of the last round, and exactly this is taken back later;
  * sending begins with the next step, so that a checkpoint after a round finds none under way;
  * during the first period members exchange one number, so that every period has its round;
  * a joining member has next to no weight in the round that is under way when it joins;
  * the last rounds are waited for, and all members end with the common parameters;
  * floating-point buffers are averaged plainly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.period import PeriodReport
from atoll.group.run_round import Exchange
from atoll.methods.overlapped import Eager
from atoll.strategies.base import SyncResult, Traffic
from atoll.strategies.codec_selection import codec_state, load_codec_state
from atoll.strategies.outer.outer_optimizers import OuterSGD
from atoll.strategies.outer.overlapped import OverlappedOuter, in_a_row, started, under
from atoll.strategies.outer.periodic import WeightRule, finite_length, start_volume
from atoll.strategies.rounds.background_round import BackgroundRound, Means, RoundResult
from atoll.strategies.rounds.initial_sync import broadcast_start
from atoll.strategies.traffic import times, total, volume
from atoll.strategies.vectors.flat import digest, pseudo_gradient
from atoll.task import Task
from atoll.wire.messages import RoundPlan

KEY = "delta"
"""Key of the codec's residual."""

NEXT_TO_NOTHING = 1e-9
"""Weight of a joining member; above 0, so that a round of joining members only has a mean."""


class EagerOuter(OverlappedOuter):
    """See the module's docstring."""

    def __init__(self, options: Eager, *, clock: Clock | None = None) -> None:
        """Check the options."""
        super().__init__(clock=clock)
        for name, least in {"every": 1, "shared_steps": 0}.items():
            if getattr(options, name) < least:
                raise ConfigError(
                    f"{name} is too small", given=getattr(options, name),
                    expected=f"{least} or more",
                )  # fmt: skip
        self.options = options
        self.shared_steps = options.shared_steps
        self._weigher = WeightRule(options.weight)
        self._common_optimizer, self._own_optimizer = self._new_optimizer(), self._new_optimizer()
        self._digest = ""
        """Of the common state; empty: members are not known to stand on the same."""
        self._first = True
        """The next round is one of the first period: there is nothing to average yet."""
        self._share = 1.0
        """Part of the own pseudo-gradient that goes, or went, ahead of its mean."""
        self._sent: Tensor | None = None
        """The own pseudo-gradient that is, or will be, under way; None: there is none."""
        self._weight = 0.0
        self._norm: float | None = None
        self._report: PeriodReport | None = None
        """Of the period whose contribution is sent with the next round."""

    def _new_optimizer(self) -> OuterSGD:
        return OuterSGD(lr=self.options.outer_lr, momentum=self.options.outer_momentum)

    # ------------------------------------------------------------------------- moments

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as common state and as this member's own."""
        super().setup(task, group=group, codec=codec)
        # Anew: the velocities of an earlier setup have the length of its parameters.
        self._common_optimizer, self._own_optimizer = self._new_optimizer(), self._new_optimizer()
        self._exact = make_codec("fp32")
        self._num_parameters = task.num_parameters
        self._settle(task)
        self._plan(task)

    def _settle(self, task: Task) -> None:
        """Set the member's state to the common one and restart the counters."""
        self._theta = self._start.clone()
        self._own_optimizer.load_state_dict(self._common_optimizer.state_dict())
        self._sent, self._share = None, 1.0 / len(self._round_client.group.members or ("",))
        self._weight, self._norm, self._report = 0.0, None, None
        self._weigher.reset(task)
        self._common_step = task.step

    def _plan(self, task: Task) -> None:
        """Start the period until the next round."""
        self._next = self._next_due(task.step)
        task.begin_period(self._next, together=self._next <= self.shared_steps)

    def _next_due(self, step: int) -> int:
        since, every = self.shared_steps, self.options.every
        return since if step < since else since + ((step - since) // every + 1) * every

    def begin(self, task: Task) -> SyncResult | None:
        """Broadcast the first member's parameters to all members."""
        result = self._same_start(task)
        self._plan(task)
        return result

    def _same_start(self, task: Task) -> SyncResult:
        number = task.round
        self._start, rounds = broadcast_start(task, self._flat, self._round_client, base=self._base)
        self._digest = digest(self._start)
        self._settle(task)
        return started(rounds, number=number, digest=self._base)

    @property
    def _base(self) -> str:
        """Digest of the common state."""
        return self._digest or "start"

    def gradients(self, task: Task) -> None:
        """Begin this period's round, at its first step."""
        if self._flight is None and task.step >= self.shared_steps:
            entered = self._clock.monotonic()
            report = self._report_now(task)
            work = self._round_client.start(self._exchange(task, waiting=False), report)
            self._flight = BackgroundRound(task.step, self._clock.monotonic() - entered, work)

    def _report_now(self, task: Task) -> PeriodReport:
        """Return the report for the round that begins now, made when its contribution was."""
        report, self._report = self._report, None
        if report is None:
            return self._round_client.report(task, base=self._base, norm=self._norm)
        return self._round_client.renew(report, task, base=self._base)

    def sync(self, task: Task) -> SyncResult | None:
        """Apply the period's round, and the member's own share of the next one."""
        if task.step < self._next:
            return None
        if task.step == self.shared_steps:
            return self.begin(task)
        delta, norm = self._delta(task)
        self._report = self._round_client.report(task, base=self._base, norm=norm)
        number, landed = self._land(task, self._flight)
        began = self._clock.monotonic()
        mean = self._mean_of(landed)
        before = self._go_ahead(task, delta, mean, landed)
        self._norm = norm
        result = self._move_on(task, number, landed, mean, reached=before, began=began)
        self._plan(task)
        return result

    def finish(self, task: Task) -> SyncResult | None:
        """Wait for the round under way, average the rest, and load the common parameters."""
        results: list[SyncResult] = []
        if self._flight is not None or not self._first:
            results.append(self._last_round(task, self._flight, reached=self._theta))
        if task.step > self._weigher.step:
            self._sent, self._norm = self._delta(task)
            self._weight, self._first = self._weigher.weight(task), False
            results.append(self._last_round(task, None, reached=self._flat.read()))
        self._first = True
        self._flat.write(self._start)
        self._settle(task)
        self._plan(task)
        return in_a_row(results)

    # -------------------------------------------------------------------------- rounds

    def _delta(self, task: Task) -> tuple[Tensor, float]:
        """Return the member's pseudo-gradient since the last round, and its norm."""
        now = self._flat.read()
        delta = pseudo_gradient(self._theta, now, out=now)
        return delta, finite_length(delta, task)

    def _exchange(self, task: Task, *, waiting: bool) -> Exchange[Means]:
        """Return the exchange of the pending pseudo-gradient."""
        codec, key, weight = self._codec, KEY, self._weight
        if self._first:
            vector, codec, key, weight = torch.zeros(1), self._exact, "first", 1.0
        elif self._sent is None:
            vector, weight = torch.zeros_like(self._start), NEXT_TO_NOTHING
        else:
            vector = self._sent

        def mean(_: RoundPlan) -> Means:
            work = self._round_client.group.reduce([vector], codec=codec, weight=weight, key=key)
            if not waiting:
                return Means.of([work.wait()])
            with task.state_lock.resting():
                return Means.of([work.wait()])

        return mean

    def _land(self, task: Task, flight: BackgroundRound | None) -> tuple[int, RoundResult]:
        """Return number and result of the round under way, or of one run now."""
        number = task.round
        if flight is not None:
            landed = flight.land(task, self._round_client, self._clock)
            self._flight = None
            return number, landed
        exchange = self._exchange(task, waiting=True)
        agreed = self._round_client.run(task, exchange, base=self._base, norm=self._norm)
        task.round += 1
        return number, RoundResult.of(agreed, agreed.seconds)

    def _mean_of(self, landed: RoundResult) -> Tensor | None:
        """Return a round's mean; None in the first period."""
        if self._first:
            return None
        return self._codec.restore_mean(
            landed.vectors[0], key=KEY, contributors=landed.contributors, weight=landed.weight,
            alone=landed.alone,
        )  # fmt: skip

    def _last_round(
        self, task: Task, flight: BackgroundRound | None, *, reached: Tensor
    ) -> SyncResult:
        """Apply a round to the common state only."""
        number, landed = self._land(task, flight)
        began = self._clock.monotonic()
        mean = self._mean_of(landed)
        return self._move_on(task, number, landed, mean, reached=reached, began=began)

    def _move_on(
        self,
        task: Task,
        number: int,
        landed: RoundResult,
        mean: Tensor | None,
        *,
        reached: Tensor,
        began: float,
    ) -> SyncResult:
        """Update the common state; `reached` is where the member's own update leads."""
        norm = 0.0
        if mean is not None:
            norm = float(mean.norm())
            if landed.alone and self._common_optimizer.is_plain:
                # start - (start - now) may differ from now in the last bit; a single member must
                # train exactly as it would without Atoll.
                self._start.copy_(reached)
            else:
                self._move(self._start, self._common_optimizer, mean)
            self._digest = digest(self._start)
        self._first, self._common_step = False, task.step
        return self._result(number, landed, began=began, delta_norm=norm)

    def _go_ahead(
        self, task: Task, delta: Tensor, mean: Tensor | None, landed: RoundResult
    ) -> Tensor:
        """Apply the others' last share and the own new one; return the parameters from before."""
        share = self._share_in(landed)
        before = self._theta
        alone = landed.alone and share == 1.0 and (self._sent is None or self._share == 1.0)
        if alone and self._own_optimizer.is_plain:
            self._theta = self._flat.read()
        else:
            g = torch.zeros_like(delta) if mean is None else mean.clone()
            if self._sent is not None and mean is not None:
                g.sub_(self._sent, alpha=self._share)
            g.add_(delta, alpha=share)
            self._theta = before.clone()
            self._move(self._theta, self._own_optimizer, g)
            self._flat.write(self._theta)
        self._sent, self._share, self._weight = delta, share, self._weigher.weight(task)
        self._weigher.reset(task)
        return before

    def _share_in(self, landed: RoundResult) -> float:
        """Return this member's share of a round's weight."""
        if self._first or self._sent is None:
            return 1.0 / max(1, len(landed.contributors))
        return self._weight / landed.weight

    def _move(self, vector: Tensor, optimizer: OuterSGD, g: Tensor) -> None:
        """Take an outer step with the parameters and average the buffers; `g` is overwritten."""
        trained = self._num_parameters
        optimizer.step(vector[:trained], g[:trained])
        vector[trained:].sub_(g[trained:])

    # ---------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the common and the own state, the round under way, and the codec's residuals."""
        pending = self._pending()
        velocity = self._own_optimizer.state_dict()
        own = {f"own.outer.{name}": value for name, value in velocity.items()}
        sent = {} if self._sent is None else {"own.sent": self._sent}
        shares = torch.tensor([self._share, self._weight], dtype=torch.float64)
        return {
            **self.shared_state(),
            "own.counters": self._weigher.state(),
            "own.theta": self._theta,
            "own.shares": shares,
            **own, **sent, **codec_state(self._codec), **pending,
        }  # fmt: skip

    def shared_state(self) -> dict[str, Tensor]:
        """Return the common state and its velocity; see :meth:`Outer.shared_state`."""
        velocity = self._common_optimizer.state_dict()
        outer = {f"shared.outer.{name}": value for name, value in velocity.items()}
        return self._shared() | {"shared.first": torch.tensor(self._first)} | outer

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: it belongs to another model.
        """
        start = state["shared.start"]
        if start.shape != self._start.shape:
            raise ConfigError(
                "this state belongs to another model",
                given=f"{start.numel()} elements",
                expected=f"{self._start.numel()}",
            )
        self._drop_flight()
        self._start = start.clone()
        self._digest = digest(self._start)
        self._first, self._common_step = bool(state["shared.first"]), int(state["shared.step"])
        self._common_optimizer.load_state_dict(under("shared.outer.", state))
        self._resumed = "own.counters" in state
        if self._resumed:  # a donor's counters do not apply to this member
            self._weigher.load(state["own.counters"])
            self._theta = state["own.theta"].clone()
            self._sent = state["own.sent"].clone() if "own.sent" in state else None
            self._share, self._weight = state["own.shares"].tolist()
            self._norm = None if self._sent is None else float(self._sent.norm())
            self._own_optimizer.load_state_dict(under("own.outer.", state))
            self._flight = BackgroundRound.load(state)
        load_codec_state(self._codec, state)
        self._next = self._next_due(self._common_step)

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        marks = 1 + (0 < self.shared_steps <= steps)
        alone = max(0, steps - self.shared_steps)
        periods = -(-alone // self.options.every) if alone else int(steps < self.shared_steps)
        return total(
            [
                times(start_volume(peers, rank=rank), marks),
                times(volume(self._exact, 1, peers, rank=rank), int(alone > 0)),
                times(volume(self._codec, elements, peers, rank=rank), periods),
            ]
        )
