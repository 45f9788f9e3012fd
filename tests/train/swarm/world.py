"""A SWARM of threads: real members, channels and ledger; the hub and the rounds are functions."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from atoll.errors import AtollError, GroupError, HubUnreachable, LeftBehind, PeerLost
from atoll.group.peers.channel import LocalNetwork
from atoll.strategies.inner.options import ActivationFormat
from atoll.strategies.inner.swarm.runner import StageRunner
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut
from atoll.swarm.evaluations import Evaluated
from atoll.swarm.ledger import Ledger
from atoll.swarm.places import SwarmSettings
from atoll.train.swarm.member import SwarmMember
from atoll.train.swarm.parts import Shapes, SwarmJob
from atoll.wire.message import Message
from atoll.wire.messages import Done
from atoll.wire.swarm import (
    SwarmAnnounce,
    SwarmDone,
    SwarmKeeps,
    SwarmKept,
    SwarmLeases,
    SwarmNews,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
)
from tests.patience import PATIENCE_S
from tests.strategies.swarm.kit import batch_of, built, confined, plainly

HELD_S = 1.0
"""How long the hub holds an answer back while there is nothing to say."""
RATE = 0.5
SavedState = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Of a module, and its weights of the step before."""
FREE_BYTES = 10**9


@dataclass
class OwnStage:
    """A stage with plain gradient descent."""

    runner: StageRunner
    evaluated_every: int = 0
    """Steps between two evaluations; 0: only at the end."""
    behind: Callable[[], bool] = lambda: False
    """Whether the others have met without this member."""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.runner.stage.parameters().values(), lr=RATE)

    def update(self, mean: Tensor | None, *, rows: int) -> None:
        self.runner.keep()
        if mean is not None:
            self.runner.apply(mean)
            self.runner.stage.constrain_gradients()
            with self.runner.stage.stepping():
                self.optimizer.step()
        self.runner.go_on()

    def meet(self, *, last: bool = False) -> None:
        """It steps with the mean of all members."""
        if last and self.behind():
            raise LeftBehind("the others met")

    @property
    def evaluates(self) -> bool:
        return self.evaluated_every > 0 and self.runner.step % self.evaluated_every == 0

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class _Part:
    vector: Tensor
    rows: int
    done: Future[Tensor]


@dataclass
class World:
    """The hub with its ledger, the network, and all members."""

    name: str
    settings: SwarmSettings
    steps: int
    codec: str = "fp32"
    members: dict[str, SwarmMember] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    verdict_s: float = 0.0
    """How long a verdict is on its way after the news that follow from it."""
    recovered: list[str] = field(default_factory=list)
    """Members that took over a state during the run."""
    evaluated_every: int = 0
    held_out: tuple[int, int] = (0, 0)
    """Microbatches of an evaluation, and of the one at the end."""
    evaluations: list[Evaluated] = field(default_factory=list)
    """What the hub stored."""
    left_behind: bool = False
    """Whether no member meets the others after the job is over."""
    unfit: AtollError | None = None
    """Why no member can build a stage."""
    rests_at: float = math.inf
    """Step from which on no microbatch is given out, until a test changes it."""

    def __post_init__(self) -> None:
        self.model = built(self.name)
        self.network = LocalNetwork()
        self.settings = replace(self.settings, steps=self.steps)
        self.ledger = Ledger(self.settings)
        self.files: dict[int, dict[int, SavedState]] = {}
        """Of each stage by step: all checkpoints, complete or not."""
        self.changed = threading.Condition()
        self._meetings: dict[tuple[int, int, int], dict[str, _Part]] = {}
        self._threads: list[threading.Thread] = []
        self.lost: set[str] = set()
        self._watches: list[tuple[Callable[[], Any], Callable[[], None], threading.Event]] = []

    # ------------------------------------------------------------------- members

    def start(self, name: str) -> SwarmMember:
        job = SwarmJob(
            stages=self.settings.stages, steps=self.steps, rows_each=4, codec=self.codec,
            copies_s=0.0, rows=self._rows, free_bytes=FREE_BYTES, early=self.settings.early,
        )  # fmt: skip
        member = SwarmMember(
            name, job, channel=self.network.channel(name), ask=_Asker(self, name),
            rounds=_Meetings(self, name), stages=_Stages(self, name),
        )  # fmt: skip
        self.members[name] = member
        self.losses[name] = []
        member.on_step = lambda total: self.losses[name].append(total.loss)
        thread = threading.Thread(target=self._run, args=(name, member), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return member

    def _rows(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        number = index - self.settings.microbatches
        return batch_of(self.name, step, index) if number < 0 else held_out_of(self.name, number)

    def _run(self, name: str, member: SwarmMember) -> None:
        try:
            member.run()
        except BaseException as error:
            if name not in self.lost:
                self.failures.append(error)

    def kill(self, name: str) -> None:
        """Lose a member as if its process had been killed; the hub notices at once."""
        self.lost.add(name)
        self.members[name].stop()
        self.network.remove(name)
        with self.changed:
            self.ledger.lost(name, time.monotonic())
            self._meet()
            self._tell()

    def wait(self) -> None:
        """Wait until all members that are left have done their last step."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not self.failures, self.failures
        assert not any(thread.is_alive() for thread in self._threads)
        assert not self._watches, "what was to be done when something holds"

    def when(self, holds: Callable[[], Any], then: Callable[[], None]) -> threading.Event:
        """Do something in the moment in which something holds, before anything else changes.

        For before the start: on a busy machine the job may be over when the test's own thread
        goes on. Returns what is set once it is done.
        """
        seen = threading.Event()
        with self.changed:
            self._watches.append((holds, then, seen))
            self._tell()
        return seen

    def until(self, holds: Callable[[], Any]) -> None:
        """Wait for what does not end before the test goes on."""
        seen = self.when(holds, lambda: None)
        with self.changed:
            assert self.changed.wait_for(lambda: self.failures or seen.is_set(), PATIENCE_S)
        assert not self.failures, self.failures

    def _tell(self) -> None:
        """Something has changed: do what tests want to be done now, and wake all that wait."""
        watches, self._watches = self._watches, []  # what they do changes something, too
        for watch in watches:
            holds, then, seen = watch
            try:
                if holds():
                    then()
                    seen.set()
                else:
                    self._watches.append(watch)
            except BaseException as error:  # the thread is a member's: the test is to fail
                self.failures.append(error)
        self.changed.notify_all()

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of all stages; members of a stage MUST have the same bits."""
        found: dict[str, Tensor] = {}
        for name, member in self.members.items():
            if name not in self.lost:
                assert member.trained is not None
                assert member.step == self.steps
                for key, value in member.trained.runner.stage.parameters().items():
                    assert torch.equal(found.setdefault(key, value.detach()), value), (name, key)
        return found

    # ----------------------------------------------------------------------- hub

    def ask(self, member: str, body: Message) -> Message:
        deadline = time.monotonic() + HELD_S
        with self.changed:
            while True:
                if member in self.lost:
                    raise HubUnreachable("this member is lost")
                answer = self._answer(member, body)
                left_s = deadline - time.monotonic()
                if answer is not None or left_s <= 0:
                    break
                self.changed.wait(left_s)
            if answer is not None:
                return answer
            if isinstance(body, SwarmWatch):
                return SwarmNews(self.ledger.step, closing=body.closing)
            return SwarmLeases([])

    def _answer(self, member: str, body: Message) -> Message | None:
        now, ledger = time.monotonic(), self.ledger
        ledger.tick(now)
        if isinstance(body, SwarmWant):
            if ledger.step >= self.rests_at:
                return None
            leases = ledger.want(member, body, now)
            return leases if leases.leases else None
        if isinstance(body, SwarmWatch):
            return ledger.news(member, body, now)
        if isinstance(body, SwarmDone):
            ledger.done(body, now)
            found, ledger.evaluations.found = ledger.evaluations.found, []
            self.evaluations += found
            answer: Message = Done()
        elif isinstance(body, SwarmKept):
            answer = SwarmKeeps(ledger.kept(member, body))
        else:
            assert isinstance(body, SwarmAnnounce)
            answer = ledger.announce(member, body, now)
            if ledger.bereft(now) >= 0:
                saved = [step for step, stages in self.files.items() if self._whole(stages)]
                ledger.go_back(max(saved, default=0), 0, now)
                answer = ledger.announce(member, body, now)
        self._meet()
        self._tell()
        return answer

    def save(self, stage: int, step: int, history: int, state: SavedState) -> None:
        with self.changed:
            self.files.setdefault(step, {})[stage] = state
            if self._whole(self.files[step]):
                self.ledger.saves.complete(step, history)
                self._tell()

    def _whole(self, stages: dict[int, SavedState]) -> bool:
        return len(stages) == self.settings.stages

    # -------------------------------------------------------------------- rounds

    def join(self, key: tuple[int, int, int], member: str, part: _Part) -> None:
        with self.changed:
            self._meetings.setdefault(key, {})[member] = part
            self._meet()
            self._tell()

    def _meet(self) -> None:
        """End the rounds whose members are all there, and those that are void."""
        for (stage, step, closing), parts in list(self._meetings.items()):
            count = self.ledger.counts[stage]
            if step != self.ledger.step or count.closing != closing:
                del self._meetings[stage, step, closing]
                for part in parts.values():
                    part.done.set_exception(GroupError("the stage is open again"))
            elif {m.holder.member for m in self.ledger.serving(stage)} <= set(parts):
                del self._meetings[stage, step, closing]
                rows = sum(part.rows for part in parts.values())
                assert rows == 4 * self.settings.microbatches, "every microbatch counts once"
                total = sum(parts[m].vector.double() * parts[m].rows for m in sorted(parts))
                assert isinstance(total, Tensor)
                self.ledger.agreed(stage, step, parts, time.monotonic())
                for part in parts.values():
                    later = threading.Timer(
                        self.verdict_s, part.done.set_result, [(total / rows).float()]
                    )
                    later.start() if self.verdict_s else later.function(*later.args)


@dataclass(frozen=True)
class _Asker:
    world: World
    me: str

    def __call__(self, body: Message, *, timeout_s: float) -> Message:
        return self.world.ask(self.me, body)


@dataclass(frozen=True)
class _Meetings:
    world: World
    me: str

    def agree(
        self, stage: int, step: int, closing: int, *, vector: Tensor, rows: int, shapes: Shapes
    ) -> Future[Tensor]:
        part = _Part(vector, rows, Future())
        self.world.join((stage, step, closing), self.me, part)
        return part.done


@dataclass(frozen=True)
class _Stages:
    world: World
    me: str

    @property
    def held_out(self) -> tuple[int, int]:
        return self.world.held_out

    def take(self, place: SwarmPlace) -> OwnStage:
        if self.world.unfit is not None:
            raise self.world.unfit
        size, step = ActivationFormat.of(self.world.codec).size, place.step
        cut = StageCut(stages=self.world.settings.stages, size=size)
        model = ModelStage(copy.deepcopy(self.world.model), place.stage, cut)
        runner = StageRunner(model, seed=7, early=self.world.settings.early)
        member = self.world.members[self.me]
        own = OwnStage(
            runner, self.world.evaluated_every, lambda: self.world.left_behind and member.finished
        )
        own.runner.begin(step)
        if step == 0:
            return own
        self.world.recovered.append(self.me)
        for name in place.donors:
            donor = self.world.members[name]
            if donor.step == step and donor.trained is not None:
                state = donor.trained.runner.stage.module.state_dict()
                own.runner.stage.module.load_state_dict(state)
                own.runner.begin(step)
                own.runner.load_older(donor.trained.runner.older())
                if donor.step == step:
                    return own
        if not place.donors:
            state, older = self.world.files[step][place.stage]
            own.runner.stage.module.load_state_dict(state)
            own.runner.begin(step)
            own.runner.load_older(older)
            return own
        raise PeerLost("no donor has this step now")

    def save(self, *, history: int, final: bool, failed: Callable[[], None]) -> None:
        trained = self.world.members[self.me].trained
        assert trained is not None
        runner = trained.runner
        state = {k: v.clone() for k, v in runner.stage.module.state_dict().items()}
        older = {k: v.clone() for k, v in runner.older().items()}
        self.world.save(runner.stage.number, runner.step, history, (state, older))


def held_out_of(name: str, number: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a microbatch of an evaluation; the last of each has fewer."""
    return batch_of(name, 10_000, number, rows=4 - number % 3)


def expected(
    name: str, *, steps: int, microbatches: int, cut: StageCut | None = None, early: int = 0
) -> tuple[dict[str, Tensor], list[float]]:
    """Return parameters and losses of the same training of the whole model in a loop.

    A `cut` says which weights are confined to a subspace: those of all stages but the last. The
    first `early` microbatches of a step are computed on the weights of the step before.
    """
    model = built(name)
    constraint = confined(model, cut) if cut is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, older = [], copy.deepcopy(model)
    for step in range(steps):
        batches = [batch_of(name, step, index) for index in range(microbatches)]
        loss, gradients, _ = plainly(model, batches[early:], rows=4)
        if early:
            late = microbatches - early
            first, older_gradients, _ = plainly(older, batches[:early], rows=4)
            loss = (early * first + late * loss) / microbatches
            gradients = {
                key: (early * older_gradients[key] + late * value) / microbatches
                for key, value in gradients.items()
            }
            older = copy.deepcopy(model)
        losses.append(loss)
        for key, parameter in model.named_parameters():
            parameter.grad = gradients[key]
        if constraint is not None:
            constraint.project_gradients()
        with nullcontext() if constraint is None else constraint.in_coordinates():
            optimizer.step()
    return {key: p.detach() for key, p in model.named_parameters()}, losses
