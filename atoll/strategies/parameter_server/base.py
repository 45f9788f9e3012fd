"""Base class of parameter-server strategies: members push at any time and meet at sync points.

Between sync points (options call them anchors) members do not wait for each other, unless the
servers' clocks require it: a member pushes its update and receives the newest vector. A sync point
is an ordinary committed round of all members (see `atoll.strategies.parameter_server.sync_points`).
It is held every `anchor_every` steps of the schedule, at the end, and after a server lost its
state. Its result is the common state: joining members load it, checkpoints store it, and servers
are loaded with it. If a server dies, updates that no member had pulled are lost, and its momentum
falls back to that of the last sync point.

The schedule counts the steps of all members together, divided by the number of members.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.errors import ConfigError, LossNotFinite, from_dict
from atoll.group.base import Group
from atoll.strategies.base import SyncResult
from atoll.strategies.outer.periodic import outcome
from atoll.strategies.parameter_server.client import (
    ParameterServerClient,
    PulledState,
    Shards,
    rule_state,
)
from atoll.strategies.parameter_server.state import ParameterServerState
from atoll.strategies.parameter_server.sync_points import Shard, SyncPoints, View, hold_sync_point
from atoll.strategies.rounds.initial_sync import broadcast_start
from atoll.strategies.rounds.round_client import RoundClient
from atoll.strategies.vectors.flat import Flat, length, pseudo_gradient
from atoll.task import Period, Task
from atoll.wire.messages import RoundPlan
from atoll.wire.parameter_server_messages import Setup

log = logging.getLogger(__name__)


class ParameterServerOuter(ParameterServerState):
    """Members of parameter servers; see the module's docstring."""

    # ------------------------------------------------------------ what a subclass may decide

    moves = True
    """What is pushed are moves of the parameters, which count whenever they arrive."""

    def learned(self, task: Task) -> Tensor:
        """Return the vector to push: here the change since the last pull, `start - now`."""
        return pseudo_gradient(self._start, self._flat.read(self._scratch), out=self._scratch)

    def push_rate(self) -> float:
        """Return the learning rate that is sent with a push."""
        return 1.0

    # -------------------------------------------------------------------- steps and pushes

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as the common state."""
        if group.aggregation.aggregate != "mean" or codec.spec.startswith("ef21"):
            raise ConfigError(
                "parameter servers apply the pushes of single members on arrival",
                given=f"aggregate = {group.aggregation.aggregate!r}, codec = {codec.spec!r}",
                expected='aggregate = "mean", and a codec with independent packets',
                remedy='outer = "diloco" works with both',
            )
        self._round_client, self._codec, self._group = RoundClient(group, self._clock), codec, group
        self._flat = Flat.of(task, rounded=True)  # servers hold float32
        codec.set_shapes(self._flat.shapes)
        self._shards = Shards(
            task.num_parameters, self._flat.num_elements, servers=self._num_servers
        )
        self._start, self._scratch = self._flat.read(), self._flat.new()
        self._anchor = self._start.clone()
        self._rules = [rule_state(self._setup_of(n)) for n in range(self._num_servers)]
        self._versions = [0] * self._num_servers
        self._anchor_versions = [0] * self._num_servers
        self._server_client = ParameterServerClient(group, self._shards, self._clock)
        self._weigher.reset(task)
        self._mark_bytes()
        self._new_period(task, self._every, self._every)

    def rejoin(self, task: Task) -> None:
        """Load the last sync point's state into the model; see :meth:`Outer.rejoin`."""
        self._start.copy_(self._anchor)
        self._flat.write(self._start)
        if not self._resumed:  # a donor's state: this member had no part in that sync point
            self._members, self._owed, self._alone = (), None, False
        self._resumed = False
        self._server_client.forget()
        self._weigher.reset(task)
        self._round_client.restart()
        self._mark_bytes()
        self._new_period(task, self._every, self._every)

    def begin(self, task: Task) -> SyncResult | None:
        """Broadcast the first member's parameters, and load the servers with them."""
        number = task.round
        vector, rounds = broadcast_start(task, self._flat, self._round_client, base=self._base)
        last = rounds[-1]
        self._anchor, self._start = vector, vector.clone()
        self._settle(task, last.plan, last.reduced.contributors)
        self._mark_bytes()
        self._enter_servers(task, patient=False)
        seconds = {k: sum(agreed.seconds[k] for agreed in rounds) for k in last.seconds}
        return outcome(last, number, seconds, digest=self._base, delta_norm=0.0)

    def sync(self, task: Task) -> SyncResult | None:
        """Push this member's update if it is due; hold a sync point if one is due."""
        self._done += 1
        self._since += 1
        if self._alone:
            return self._hold(task) if task.step >= self._next_anchor else None
        if not self._server_client.attached and not self._enter_servers(task, patient=True):
            return self._hold(task)
        if self._done < self._planned:
            return None
        if not self._push(task) or self._hurry or task.step >= self._next_anchor:
            return self._hold(task)
        return None

    def finish(self, task: Task) -> SyncResult | None:
        """Push what is left and hold sync points until all members are done."""
        if self._final:
            return None
        if not self._alone:
            if not self._server_client.attached and not self._enter_servers(task, patient=True):
                return replace(self._hold(task), more=True)
            if (self._done or self._owed is not None) and not self._push(task):
                return replace(self._hold(task), more=True)
        return self._hold(task, done=True)

    # ----------------------------------------------------------------------------- servers

    def _enter_servers(self, task: Task, *, patient: bool) -> bool:
        """Attach to the servers; return whether they hold this member's sync point.

        A member that joins late loads the servers' vector and drops what it computed before.
        """
        if self._alone:
            return True
        fresh = bool(self._members)
        # Right after a sync point the state may not be read yet: the task's history lacks its
        # result.
        with task.state_lock.resting() if patient else nullcontext():
            pulled = self._server_client.attach(
                self._epoch, self._members, self._load_of, patient=patient
            )
        if pulled is None:
            return False
        if not fresh:
            self._take(task, pulled)
        elif not self._done:
            self._new_period(task, pulled.first.steps, pulled.first.length)
        return True

    def _load_of(self, number: int) -> tuple[Shard, Setup, float]:
        """Return the content that a server is loaded with."""
        return self._anchor_shard(number), self._setup_of(number), float(self._anchor_step)

    def _push(self, task: Task) -> bool:
        """Push and pull the newest vector; return False if the servers' state is unknown."""
        vector, steps = self.learned(task), self._done
        if not math.isfinite(length(vector)):
            raise LossNotFinite(
                "the update of this member is not finite; it was not pushed",
                given=f"member {task.member}, step {task.step}",
                expected="finite numbers",
                remedy="lower the learning rate, or clip the gradients",
            )
        if self._owed is not None:
            vector.add_(self._owed)
        with task.state_lock.resting():
            pulled = self._server_client.push(
                vector, self._codec, anchor=self._epoch, versions=self._versions, steps=steps,
                weight=self._weigher.weight(task), rate=self.push_rate(),
            )  # fmt: skip
        task.waited_s += self._server_client.take_waited()
        self._codec.finish(committed=pulled.accepted)
        self._owed = self._undelivered(vector, pulled)
        if pulled.refused is not None:
            raise from_dict(pulled.refused)
        if pulled.lost:
            self._weigher.reset(task)
            return False
        self._take(task, pulled)
        return True

    def _undelivered(self, vector: Tensor, pulled: PulledState) -> Tensor | None:
        """Return the part of a push that servers without state could not apply."""
        if not pulled.lost or not self.moves:
            return None
        owed = torch.zeros_like(vector)
        for number in pulled.lost:
            self._shards.put(owed, number, self._shards.take(vector, number))
        return owed

    def _take(self, task: Task, pulled: PulledState) -> None:
        """Continue from the servers' vector."""
        for number, values in pulled.values.items():
            self._shards.put(self._start, number, values)
        self._versions = pulled.versions
        self._flat.write(self._start)
        self._hurry = pulled.first.hurry
        self._weigher.reset(task)
        _come_to(task, int(pulled.first.progress + 1e-6))
        self._new_period(task, pulled.first.steps, pulled.first.length)

    def _new_period(self, task: Task, steps: int, length: int) -> None:
        """Plan the steps until the next push."""
        left = task.last - task.step
        if 0 < left < length:
            steps, length = max(1, -(-steps * left // length)), left
        task.period = Period(task.step, length, steps)
        self._done, self._planned = 0, steps

    # ----------------------------------------------------------------------------- anchors

    def _hold(self, task: Task, *, done: bool = False) -> SyncResult:
        """Hold a sync point: the servers' state becomes the common state."""
        number = task.round
        if self._alone:
            self._flat.read(self._start)
            self._versions = [version + 1 for version in self._versions]
        else:
            self._server_client.idle(self._epoch, final=done)
        task.waited_s += self._server_client.take_waited()
        entered = self._clock.monotonic()
        report = replace(self._round_client.report(task, base=self._base), steps=self._since)
        step = max(task.step, int(self._server_client.progress + 1e-6))

        def exchange(plan: RoundPlan) -> SyncPoints:
            fetch = not self._alone and plan.members[0] == self._group.me
            shards = [self._known(server, fetch=fetch) for server in range(self._num_servers)]
            view = View(shards, float(step), done)
            return hold_sync_point(self._group, plan, view, resting=nullcontext)

        prepare_s = self._clock.monotonic() - entered
        work = self._round_client.start(exchange, report)
        with task.state_lock.resting():
            agreed = work.wait()
        self._round_client.apply_verdict(task, agreed)
        began, found = self._clock.monotonic(), agreed.reduced
        norm = self._adopt(found)
        self._final = found.done
        _come_to(task, int(found.progress))
        self._settle(task, agreed.plan, found.contributors)
        task.round = number + 1
        sent, received = self._mark_bytes()
        apply_s = self._clock.monotonic() - began
        self._round_client.note_applied(apply_s)
        if not self._final:
            self._enter_servers(task, patient=False)
        seconds = agreed.seconds | {"prepare": prepare_s, "apply": apply_s}
        result = outcome(agreed, number, seconds, digest=self._base, delta_norm=norm)
        more = done and not self._final
        return replace(result, sent_bytes=sent, received_bytes=received, more=more)

    def _known(self, number: int, *, fetch: bool) -> Shard:
        """Return a server's state if it can be fetched, else what this member pulled last."""
        own = replace(
            self._anchor_shard(number),
            theta=self._shards.take(self._start, number).clone(),
            version=self._versions[number],
        )
        found = self._server_client.fetch(self._epoch, own, server=number) if fetch else None
        return own if found is None else found

    def _settle(self, task: Task, plan: RoundPlan, members: tuple[str, ...]) -> None:
        """Make a just committed sync point this member's base."""
        # Plan numbers restart when another hub resumes the run; those of sync points must not.
        self._epoch = max(plan.epoch, self._epoch + 1)
        self._anchor_step, self._members = task.step, members
        self._alone = self.is_plain and plan.route == "alone"
        self._hurry, self._since = False, 0
        self._base = self._digest()
        self._server_client.forget()
        self._weigher.reset(task)
        self._new_period(task, self._every, self._every)

    def _mark_bytes(self) -> tuple[int, int]:
        """Return the bytes sent and received since the last call."""
        before = self._marked
        self._marked = (self._group.sent_bytes, self._group.received_bytes)
        return self._marked[0] - before[0], self._marked[1] - before[1]


def _come_to(task: Task, step: int) -> None:
    """Advance the schedule to where all members together are, if that is further."""
    for _ in range(step - task.step):
        task.step += 1
        if task.scheduler is not None:
            task.scheduler.step()
