"""A SWARM of threads: real members, channels and ledger; the hub and the rounds are functions."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.errors import GroupError, HubUnreachable, PeerLost
from atoll.group.peers.channel import LocalNetwork
from atoll.strategies.inner.swarm.runner import StageRunner
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut
from atoll.swarm.ledger import Ledger
from atoll.swarm.places import SwarmSettings
from atoll.train.swarm.member import SwarmMember
from atoll.train.swarm.parts import SwarmJob
from atoll.wire.message import Message
from atoll.wire.messages import Done
from atoll.wire.swarm import SwarmAnnounce, SwarmDone, SwarmLeases, SwarmNews, SwarmWant, SwarmWatch
from tests.patience import PATIENCE_S
from tests.strategies.swarm.kit import batch_of, built, plainly

HELD_S = 1.0
"""How long the hub holds an answer back while there is nothing to say."""
RATE = 0.5


@dataclass
class OwnStage:
    """A stage with plain gradient descent."""

    runner: StageRunner

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.runner.stage.parameters().values(), lr=RATE)

    def update(self) -> None:
        self.optimizer.step()


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

    def __post_init__(self) -> None:
        # Threads share the random state, so the model is built once, before they start.
        self.model = built(self.name)
        self.network = LocalNetwork()
        self.ledger = Ledger(self.settings)
        self.changed = threading.Condition()
        self._meetings: dict[tuple[int, int, int], dict[str, _Part]] = {}
        self._threads: list[threading.Thread] = []
        self.lost: set[str] = set()

    # ------------------------------------------------------------------- members

    def start(self, name: str) -> SwarmMember:
        job = SwarmJob(
            stages=self.settings.stages, steps=self.steps, rows_each=4, codec=self.codec,
            rows=lambda step, index: batch_of(self.name, step, index),
        )  # fmt: skip
        member = SwarmMember(
            name, job, channel=self.network.channel(name), ask=_Asker(self, name),
            rounds=_Meetings(self, name), stages=_Stages(self, name),
        )  # fmt: skip
        self.members[name] = member
        self.losses[name] = []
        member.on_step = lambda step, loss: self.losses[name].append(loss)
        thread = threading.Thread(target=self._run, args=(name, member), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return member

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
            self.changed.notify_all()

    def wait(self) -> None:
        """Wait until all members that are left have done their last step."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not self.failures, self.failures
        assert not any(thread.is_alive() for thread in self._threads)

    def until(self, holds: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.failures or holds(), PATIENCE_S)
        assert not self.failures, self.failures

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
            leases = ledger.want(member, body, now)
            return leases if leases.leases else None
        if isinstance(body, SwarmWatch):
            return ledger.news(member, body, now)
        if isinstance(body, SwarmDone):
            ledger.done(body, now)
            answer: Message = Done()
        else:
            assert isinstance(body, SwarmAnnounce)
            answer = ledger.announce(member, body, now)
        self._meet()
        self.changed.notify_all()
        return answer

    # -------------------------------------------------------------------- rounds

    def join(self, key: tuple[int, int, int], member: str, part: _Part) -> None:
        with self.changed:
            self._meetings.setdefault(key, {})[member] = part
            self._meet()
            self.changed.notify_all()

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
                    part.done.set_result((total / rows).float())


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
        self, stage: int, step: int, closing: int, *, vector: Tensor, rows: int
    ) -> Future[Tensor]:
        part = _Part(vector, rows, Future())
        self.world.join((stage, step, closing), self.me, part)
        return part.done


@dataclass(frozen=True)
class _Stages:
    world: World
    me: str

    def take(self, stage: int, step: int, donors: Sequence[str]) -> OwnStage:
        cut = StageCut(stages=self.world.settings.stages)
        own = OwnStage(StageRunner(ModelStage(copy.deepcopy(self.world.model), stage, cut), seed=7))
        if step == 0:
            return own
        for name in donors:
            donor = self.world.members[name]
            if donor.step == step and donor.trained is not None:
                state = donor.trained.runner.stage.module.state_dict()
                own.runner.stage.module.load_state_dict(state)
                if donor.step == step:
                    return own
        raise PeerLost("no donor has this step now")


def expected(name: str, *, steps: int, microbatches: int) -> tuple[dict[str, Tensor], list[float]]:
    """Return parameters and losses of the same training of the whole model in a loop."""
    model = built(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        batches = [batch_of(name, step, index) for index in range(microbatches)]
        loss, gradients, _ = plainly(model, batches, rows=4)
        losses.append(loss)
        for key, parameter in model.named_parameters():
            parameter.grad = gradients[key]
        optimizer.step()
    return {key: p.detach() for key, p in model.named_parameters()}, losses
