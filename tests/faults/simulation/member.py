"""A member: trains, meets the others through the real group, recovers, saves, finishes.

Training is replaced by arithmetic on a dozen numbers; everything around it (when a member joins,
what it does on each error, when it recovers) is what the trainer does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from atoll.codec.registry import make_codec
from atoll.errors import AtollError, GroupLeft, LeftBehind
from atoll.group.hub import HubGroup
from atoll.group.period import PeriodReport
from atoll.group.run_round import CommittedMean, mean_exchange, run_round
from atoll.wire.messages import (
    CheckpointPart,
    CheckpointState,
    Finished,
    Lease,
    MemberStats,
    Registered,
    RoundPlan,
    Verdict,
)
from tests.faults.simulation import recovery
from tests.faults.simulation.disk import JOB, hash_of
from tests.faults.simulation.oracle import Contribution, Stretch
from tests.faults.simulation.processes import LEFT, Child
from tests.faults.simulation.state import ELEMENTS, Replica, digest_of

if TYPE_CHECKING:
    from tests.faults.simulation.fibers import SimulatedFuture
    from tests.faults.simulation.world import World

STEPS = 8
"""Steps of a whole period."""


class Member(Child):
    """One training process."""

    def __init__(self, world: World, name: str, **more: Any) -> None:
        super().__init__(world, name, world.new_line(), **more)
        self.id = name.partition("#")[0]
        self.replica = Replica()
        self.standing = False
        """Whether it holds the committed state of some round."""
        self.step_s = world.step_s(self.id)
        self.pace = 1.0
        self.lease = Lease(int(self.id[1:]))
        self.trained = 0
        """Samples of the lease since its cursor."""
        self.donor = ""
        self.waiting_for: dict[Any, SimulatedFuture] = {}
        self.images: dict[int, bytes] = {}
        self.group: HubGroup | None = None
        self.finished = False
        self.disk_full_until = 0.0

    # ------------------------------------------------------------------------- as a donor

    @property
    def round(self) -> int:
        return self.replica.round

    def digest(self) -> str:
        return self.replica.digest()

    def answer(self, question: tuple[Any, ...]) -> tuple[Any, ...]:
        """Answer somebody who recovers."""
        kind, round_, *rest = question
        if self.standing and self.round == round_:
            self.images[round_] = self.replica.to_bytes()
        image = self.images.get(round_)
        if image is None:
            return ("gone", self.round)
        pieces = [image[i : i + recovery.CHUNK] for i in range(0, len(image), recovery.CHUNK)]
        if kind == "chunk":
            return ("chunk", pieces[rest[0]])
        hashes = [digest_of(piece) for piece in pieces]
        return ("manifest", digest_of(image), hashes)

    def broke(self, process: Any) -> None:
        """A connection to another process ended."""
        future = self.waiting_for.get(process)
        if future is not None and not future.done():
            future.set_result(("lost",))

    # -------------------------------------------------------------------------- the program

    def begin(self, token: str) -> None:
        self.connect(f"{JOB}/{self.id}", token)
        self.world.fibers.start(self, self._main, "main")

    def terminate(self) -> None:
        """Leave on SIGTERM: finish or abandon the round, then end."""
        if self.alive:
            self.world.fibers.start(self, self._leave, "leave")

    def _leave(self) -> None:
        if self.group is not None:
            self.group.leave("SIGTERM")
        self.leave(LEFT)

    def _main(self) -> None:
        link: Any = self.link
        try:
            self.group = HubGroup(
                link, job=JOB, member=self.id, hub="http://hub", route=self.world.route
            )
            self._watch(self.group)
            registered = self.group.register()
            if link.failed is None:
                self._train(self.group, registered)
            if self.group.leaving:
                return
            self.finished = True
            link.close(Finished(ok=True, result={"digest": self.digest()}), timeout_s=60.0)
            self.leave(0)
        except GroupLeft:
            return
        except AtollError as error:
            self.world.note(f"{self.name} fails: {type(error).__name__}: {error}")
            self._fail(error)

    def _watch(self, group: HubGroup) -> None:
        """Let the oracle and the faults see what passes between this member and its group."""
        join, commit = group.join, group.commit

        def joined(*args: Any, **kwargs: Any) -> RoundPlan:
            plan = join(*args, **kwargs)
            self.world.oracle.gives(plan.epoch, self.giving)
            self.world.reached("member", "plan told", self)
            return plan

        def committed(*args: Any, **kwargs: Any) -> Verdict:
            verdict = commit(*args, **kwargs)
            self.world.oracle.told(verdict)
            return verdict

        vars(group).update(join=joined, commit=committed)

    def _fail(self, error: AtollError) -> None:
        link = self.link
        self.error = error.to_dict()
        if link is not None and link.failed is None:
            try:
                link.close(Finished(ok=False, error=self.error))
            except AtollError as trouble:
                self.world.note(f"{self.name}: no last words: {trouble}")
            self.leave(1)
        else:
            self.leave(76)

    def _train(self, group: HubGroup, registered: Registered) -> None:
        if registered.recover:
            self._recover(group)
        else:
            if registered.resume_round >= 0:
                self.replica = self.world.checkpoint(registered.resume_round)
            if registered.lease is not None:
                self.lease = registered.lease
            self.standing = True
        while self.round < self.world.rounds_wanted and not group.stopping:
            stretch, steps, busy_s = self._period(group)
            try:
                self._meet(group, stretch, steps, busy_s)
            except LeftBehind as error:
                self.world.note(f"{self.name} is left behind: {error}")
                self.world.oracle.wasted_steps += steps
                self._recover(group)

    def _period(self, group: HubGroup) -> tuple[Stretch, int, float]:
        """Train until the next round is due; join every second one before the last step."""
        began = self.lease.cursor.get("offset", 0)
        steps = round(STEPS * self.pace)
        early = steps > 1 and self.round % 2 == 1
        self.world.fibers.sleep(max(0.001, (steps - early) * self.step_s))
        if early:
            place = Lease(self.lease.slot, {"data_pass": 0, "offset": began + steps})
            group.announce(PeriodReport(self.round, self.digest(), lease=place))
            self.world.fibers.sleep(self.step_s)
        return (self.lease.slot, began, began + steps), steps, steps * self.step_s

    def _meet(self, group: HubGroup, stretch: Stretch, steps: int, busy_s: float) -> None:
        slot, _, end = stretch
        values = torch.tensor(
            [float(self.world.random.randrange(-64, 64)) for _ in range(ELEMENTS)]
        )
        self.giving = Contribution(self.id, self.name, float(steps), values, stretch)
        place = Lease(slot, {"data_pass": 0, "offset": end}) if steps else self.lease
        agreed = run_round(
            group,
            mean_exchange(group, [values], codec=make_codec("fp32"), weight=float(steps)),
            PeriodReport(
                self.round,
                self.digest(),
                steps=steps,
                busy_s=busy_s,
                lease=place,
                stats=self._account(),
            ),
        )
        self.world.reached("member", "verdict told", self)
        self._apply(agreed)
        self.world.reached("member", "applying", self)
        if self.round % self.world.checkpoint_every == 0:
            self._save(group)

    def _account(self) -> MemberStats:
        """Tell of the period; every second member tells what cannot be, which harms nobody."""
        if int(self.id[1:]) % 2:
            return MemberStats({"wait": math.nan, "send": -1.0}, math.inf, math.nan)
        return MemberStats({"wait": 0.1, "send": 0.2, "vote": 0.1, "apply": 0.1}, 1.0, 2.0)

    def _apply(self, agreed: CommittedMean) -> None:
        """Take over what was agreed; a kill in the middle leaves nothing behind."""
        self.world.fibers.sleep(0.002)
        self.replica.apply(agreed.reduced.tensors[0])
        self.world.oracle.applies(self.id, self.name, agreed, self.digest())
        self.images.pop(self.round - 2, None)
        lease = agreed.verdict.leases.get(self.id)
        if lease is not None:
            self.lease = lease
        elif self.giving.stretch[2] and self.id in agreed.reduced.contributors:
            self.lease = Lease(self.lease.slot, {"data_pass": 0, "offset": self.giving.stretch[2]})
        self.pace = agreed.verdict.pace.get(self.id, 1.0)

    def _recover(self, group: HubGroup) -> None:
        """Take over the committed state; again, while the group is faster."""
        self.standing = False
        while True:
            replica, lease, pace, givers = recovery.fetch(self, group)
            self.replica, self.standing = replica, True
            if lease is not None:
                self.lease = lease
            self.pace = pace
            if givers != ["checkpoint"]:
                self.world.oracle.stands(self.id, self.round, self.digest(), ", ".join(givers))
            self.world.reached("member", "recovering: standing", self)
            try:
                group.standing(self.round, base=self.digest(), sources=givers)
            except LeftBehind as error:
                self.world.note(f"{self.name} stands on the wrong round: {error}")
                continue
            self.world.note(f"{self.name} stands on round {self.round} from {givers}")
            return

    # -------------------------------------------------------------------------- checkpoints

    def _save(self, group: HubGroup) -> None:
        """Copy the state, then write and publish it beside the training."""
        self.world.reached("member", "checkpoint: copy", self)
        data, round_ = self.replica.to_bytes(), self.round
        shared = group.members[0] == self.id

        def publish() -> None:
            link = self.link
            try:
                for name in [f"{self.id}.safetensors", *(["shared.safetensors"] if shared else [])]:
                    self.world.reached("member", "checkpoint: write", self)
                    self.world.fibers.sleep(0.02)
                    if self.world.disk.full or self.scheduler.now < self.disk_full_until:
                        return
                    path = f"checkpoints/round-{round_:06d}/{name}"
                    self.world.disk.files[path] = data
                    self.world.reached("member", "checkpoint: publish", self)
                    part = CheckpointPart(round_, round_, name, hash_of(data), len(data))
                    answer = link.request(part, timeout_s=60.0) if link is not None else None
                    if isinstance(answer, CheckpointState) and answer.published:
                        self.world.note(f"checkpoint of round {round_} is complete")
            except AtollError as error:
                self.world.note(f"{self.name} could not save round {round_}: {error}")

        self.world.fibers.start(self, publish, "saver")
