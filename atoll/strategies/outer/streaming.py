"""Streaming DiLoCo: average one fragment of the model at a time, while training continues.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"
(https://arxiv.org/abs/2501.18512), Algorithm 2. Legend: p a fragment of F, t_p its offset, H =
`every`, tau = `delay`, alpha = `mix`, theta_p the common parameters of a fragment, theta_i a
member's.

    at step t = t_p (mod H):        Delta_i = theta_p - theta_i ; begin to average
    at step t = t_p + tau (mod H):  theta_p = OuterSGD_p(theta_p, mean of Delta)
                                    theta_i = alpha theta_i + (1 - alpha) theta_p

There are F times as many rounds as in DiLoCo, each 1/F as large, and each has tau steps to finish
before training waits. The common step number selects the fragment. Evaluation, checkpoints and
joining members use the common parameters.

Differs from the paper:
  * contributions weigh by the tokens they were trained on, unless `weight = "equal"`;
  * the run may start warm: in the first `shared_steps` all members compute on the same data;
  * a last round, for which members wait, averages all fragments at once, so that all end with the
    common parameters and nothing that was trained is dropped;
  * with `delay = "auto"` tau follows from the measured times of rounds and steps: the verdict of a
    round carries the tau of the next one, so it is the same on all members;
  * tensors outside numbered layers are spread over all fragments (see `fragments`);
  * floating-point buffers are averaged plainly, with the fragment of their layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.codec.base import Codec
from atoll.digest import Digest
from atoll.errors import ConfigError
from atoll.group.base import Group, Reduced
from atoll.group.run_round import Exchange
from atoll.methods.overlapped import Streaming
from atoll.strategies.base import SyncResult, Traffic
from atoll.strategies.codec_selection import codec_state, load_codec_state
from atoll.strategies.outer.outer_optimizers import OuterSGD
from atoll.strategies.outer.overlapped import OverlappedOuter, in_a_row, started, under
from atoll.strategies.outer.periodic import WeightRule, finite_length, start_volume
from atoll.strategies.outer.streaming_plan import StreamingPlan
from atoll.strategies.rounds.background_round import BackgroundRound, Means, RoundResult
from atoll.strategies.rounds.initial_sync import broadcast_start
from atoll.strategies.traffic import times, total, volume
from atoll.strategies.vectors.flat import digest, pseudo_gradient
from atoll.strategies.vectors.fragments import PATTERNS, cut, names_of
from atoll.task import Task
from atoll.wire.messages import RoundPlan


class StreamingOuter(OverlappedOuter):
    """See the module's docstring."""

    def __init__(self, options: Streaming, *, clock: Clock | None = None) -> None:
        """Check the options."""
        super().__init__(clock=clock)
        if options.pattern not in PATTERNS:
            raise ConfigError(
                "unknown pattern of fragments", given=repr(options.pattern),
                expected=f"one of {', '.join(PATTERNS)}",
            )  # fmt: skip
        if not 0 <= options.mix <= 1:
            raise ConfigError("mix is out of range", given=options.mix, expected="0 to 1")
        self.options = options
        self.shared_steps = options.shared_steps
        self._schedule = StreamingPlan(
            every=options.every, count=options.fragments, delay=options.delay,
            since=options.shared_steps, staggered=options.staggered,
        )  # fmt: skip
        self._weighers = [WeightRule(options.weight) for _ in range(options.fragments)]
        self._optimizers = [
            OuterSGD(lr=options.outer_lr, momentum=options.outer_momentum)
            for _ in range(options.fragments)
        ]
        self._begun = False
        """Whether all members are known to have the same common state."""

    # --------------------------------------------------------------- steps and rounds

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as common state, cut into fragments."""
        super().setup(task, group=group, codec=codec)
        self._fragments = cut(
            self._flat.tensors, names_of(task.model, self._flat.tensors),
            trained=len(task.parameters()), count=self.options.fragments,
            pattern=self.options.pattern,
        )  # fmt: skip
        self._schedule.last = task.last
        self._keep(self._start)
        self._settle(task)
        self._plan(task)

    def _settle(self, task: Task) -> None:
        """Restart the counters; the member's parameters equal the common ones."""
        self._common_step = task.step
        for weigher in self._weighers:
            weigher.reset(task)

    def _keep(self, start: Tensor) -> None:
        """Make a vector the common state."""
        self._start = start
        common = self._flat.views(start)
        self._common = [fragment.of(common) for fragment in self._fragments]
        self._digests: list[str] = []

    def _plan(self, task: Task) -> None:
        """Start the period until the next event: a round begins, or its result is applied."""
        if self._flight is not None:
            self._next = self._flight.step + self._schedule.delay
        else:
            self._next = self._schedule.next_due(task.step)
        task.begin_period(self._next, together=self._next <= self.shared_steps)

    def begin(self, task: Task) -> SyncResult | None:
        """Broadcast the first member's parameters to all members."""
        result = self._same_start(task)
        self._plan(task)
        return result

    def _same_start(self, task: Task) -> SyncResult:
        number = task.round
        start, rounds = broadcast_start(task, self._flat, self._round_client, base=self._base)
        self._keep(start)
        self._settle(task)
        self._begun = True
        return started(rounds, number=number, digest=self._base)

    def sync(self, task: Task) -> SyncResult | None:
        """Begin a round, or apply the result of the one under way, if it is due."""
        if task.step < self._next:
            return None
        result: SyncResult | None = None
        if self._flight is not None:
            result = self._take(task, self._flight)
        elif task.step == self.shared_steps:
            result = self._same_start(task)
        elif self._schedule.delay:
            self._flight = self._begin_round(task, self._schedule.due_at(self._next))
        else:
            result = self._hold(task, self._schedule.due_at(self._next))
        self._plan(task)
        return result

    def finish(self, task: Task) -> SyncResult | None:
        """Apply the round under way, average what was trained since, load the common parameters."""
        results = [] if self._flight is None else [self._take(task, self._flight)]
        rest = [p for p, weigher in enumerate(self._weighers) if weigher.step < task.step]
        if rest:
            results.append(self._hold(task, rest))
        self._flat.write(self._start)
        self._plan(task)
        return in_a_row(results)

    # ------------------------------------------------------------------------ rounds

    def _begin_round(self, task: Task, which: Sequence[int]) -> BackgroundRound:
        """Begin a round on a background thread."""
        entered = self._clock.monotonic()
        exchange, prepare = self._offer(task, which)
        report = self._round_client.report(task, base=self._base)
        work = self._round_client.start(exchange, report, prepare=prepare)
        return BackgroundRound(task.step, self._clock.monotonic() - entered, work)

    def _hold(self, task: Task, which: Sequence[int]) -> SyncResult:
        """Run a round while training waits."""
        entered = self._clock.monotonic()
        exchange, prepare = self._offer(task, which, waiting=True)
        norm = prepare()
        number, prepare_s = task.round, self._clock.monotonic() - entered
        agreed = self._round_client.run(task, exchange, base=self._base, norm=norm)
        task.round += 1
        landed = RoundResult.of(agreed, agreed.seconds | {"prepare": prepare_s})
        return self._apply(task, landed, which, number=number, mix=0.0, current=True)

    def _offer(
        self, task: Task, which: Sequence[int], *, waiting: bool = False
    ) -> tuple[Exchange[Means], Callable[[], float]]:
        """Return the exchange of the fragments' current pseudo-gradients, and its preparation.

        The latter computes them and returns their norm; the same thread calls it first.
        """
        deltas: list[tuple[int, Tensor, float]] = []
        snapshots, step = [], task.step
        for p in which:
            own = self._fragments[p].of(self._flat.tensors, task=task)
            snapshots.append((p, own.snapshot(), self._weighers[p].weight(task)))
            self._weighers[p].reset(task)

        def prepare() -> float:
            squares = 0.0
            while snapshots:
                p, copied, weight = snapshots.pop(0)
                now = copied()
                delta = pseudo_gradient(self._common[p].read(), now, out=now)
                squares += finite_length(delta, task, step=step) ** 2
                deltas.append((p, self.outgoing(p, delta), weight))
            return math.sqrt(squares)

        def exchange(_: RoundPlan) -> Means:
            found = []
            for p, delta, weight in deltas:
                work = self._round_client.group.reduce(
                    [delta], codec=self._codec, weight=weight, key=f"fragment{p}"
                )
                if not waiting:
                    found.append(work.wait())
                    continue
                with task.state_lock.resting():
                    found.append(work.wait())
            for p, _delta, weight in deltas:
                found += self.exchange_beside(p, weight)
            return Means.of(found)

        return exchange, prepare

    def outgoing(self, fragment: int, delta: Tensor) -> Tensor:
        """Return what is sent of a fragment's pseudo-gradient: all of it."""
        return delta

    def exchange_beside(self, fragment: int, weight: float) -> list[Reduced]:
        """Exchange more for a fragment, in the same round and on its thread: nothing."""
        return []

    def merged(self, fragment: int, mean: Tensor, beside: Iterator[Tensor]) -> Tensor:
        """Return the pseudo-gradient to apply, from the means of what was sent.

        `beside` has what was exchanged beside it, from this fragment on.
        """
        return mean

    def _take(self, task: Task, flight: BackgroundRound) -> SyncResult:
        """Apply the result of the round under way."""
        number = task.round
        landed = flight.land(task, self._round_client, self._clock)
        self._flight = None
        which = self._schedule.due_at(flight.step)
        return self._apply(
            task, landed, which, number=number, mix=self.options.mix,
            current=task.step == flight.step,
        )  # fmt: skip

    def _apply(
        self,
        task: Task,
        landed: RoundResult,
        which: Sequence[int],
        *,
        number: int,
        mix: float,
        current: bool,
    ) -> SyncResult:
        """Take outer steps with the means and mix the common parameters into the member's own.

        `current`: no step was done since the contribution was made.
        """
        began = self._clock.monotonic()
        self._schedule.learn(landed.delay)
        means, beside = landed.vectors[: len(which)], iter(landed.vectors[len(which) :])
        squares = 0.0
        for p, raw in zip(which, means, strict=True):
            mean = self._codec.restore_mean(
                raw, key=f"fragment{p}", contributors=landed.contributors, weight=landed.weight,
                alone=landed.alone,
            )  # fmt: skip
            mean = self.merged(p, mean, beside)
            squares += float(mean.norm()) ** 2
            common, own = self._common[p], self._fragments[p].of(self._flat.tensors, task=task)
            if landed.alone and current and self._optimizers[p].is_plain:
                # start - (start - now) may differ from now in the last bit; a single member must
                # train exactly as it would without Atoll.
                theta = own.read()
            else:
                theta = common.read()
                trained = self._fragments[p].num_parameters
                self._optimizers[p].step(theta[:trained], mean[:trained])
                theta[trained:].sub_(mean[trained:])
            common.write(theta)
            if self._digests:
                self._digests[p] = digest(theta)
            if mix == 0.0:
                own.write(theta)
            elif mix < 1.0:
                own.mix(theta, keep=mix)
        self._common_step = task.step
        return self._result(number, landed, began=began, delta_norm=math.sqrt(squares))

    # ------------------------------------------------------------------- the common state

    @property
    def _base(self) -> str:
        """Digest of the fragments' digests: a round changes only a few of them."""
        if not self._begun:
            return "start"
        if not self._digests:
            self._digests = [digest(part.read()) for part in self._common]
        text = " ".join(self._digests).encode()
        return Digest(text).hexdigest()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the common state, the counters, the codec's residuals and a pending result."""
        pending, counters = self._pending(), [weigher.state() for weigher in self._weighers]
        own = {"own.counters": torch.stack(counters)}
        return self.shared_state() | own | codec_state(self._codec) | pending

    def shared_state(self) -> dict[str, Tensor]:
        """Return the common state and the outer velocities; see :meth:`Outer.shared_state`."""
        velocities = {
            f"shared.outer.{p}.{name}": value
            for p, optimizer in enumerate(self._optimizers)
            for name, value in optimizer.state_dict().items()
        }
        sizes = torch.tensor([fragment.num_elements for fragment in self._fragments])
        delay = torch.tensor(self._schedule.delay)
        return self._shared() | {"shared.fragments": sizes, "shared.delay": delay} | velocities

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: it belongs to another model or to other fragments.
        """
        sizes = [fragment.num_elements for fragment in self._fragments]
        if state["shared.fragments"].tolist() != sizes:
            raise ConfigError(
                "this state belongs to another model or to other fragments",
                given=f"fragments of {state['shared.fragments'].tolist()} elements",
                expected=f"{sizes}",
                remedy="resume with the model, fragments and pattern it was written with",
            )
        self._drop_flight()
        self._keep(state["shared.start"].clone())
        self._begun = True
        self._common_step = int(state["shared.step"])
        self._schedule.learn(int(state["shared.delay"]))
        for p, optimizer in enumerate(self._optimizers):
            optimizer.load_state_dict(under(f"shared.outer.{p}.", state))
        self._resumed = "own.counters" in state
        if self._resumed:  # a donor's counters do not apply to this member
            for weigher, row in zip(self._weighers, state["own.counters"], strict=True):
                weigher.load(row)
            self._flight = BackgroundRound.load(state)
        load_codec_state(self._codec, state)
        self._next = self._schedule.next_due(self._common_step)
        if self._flight is not None:
            self._next = self._flight.step + self._schedule.delay

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; before `setup` the fragments count as equally large."""
        count = self.options.fragments
        sizes = [elements * (p + 1) // count - elements * p // count for p in range(count)]
        if hasattr(self, "_fragments") and elements == self._flat.num_elements:
            sizes = [fragment.num_elements for fragment in self._fragments]
        each = [volume(self._codec, size, peers, rank=rank) for size in sizes]
        rounds = self._schedule.rounds(steps)
        marks = 1 + (0 < self.shared_steps <= steps)
        parts = [times(start_volume(peers, rank=rank), marks)]
        parts += [replace(total([each[p] for p in which]), rounds=1) for which in rounds]
        return total(parts)
