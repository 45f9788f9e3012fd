"""Members that do as the protocol says, whatever happens to them, around a `RoundMachine`."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.errors import GroupError, LeftBehind
from atoll.rounds.commit import CommitLog
from atoll.rounds.data_slots import DataSlots
from atoll.rounds.effects import Decided, Effect, MemberDropped, Planned, Refused, StateAdopted
from atoll.rounds.machine import RoundMachine
from atoll.wire.messages import Lease, RoundJoin, RoundPlan, RoundVote, Verdict
from atoll.wire.states import RoundMemberState

STEP_S = 2.0


@dataclass
class Process:
    """One member's process."""

    round: int = 0
    state: str = "start"
    """What it stands on: grows with every committed result."""
    frozen: bool = False
    doing: str = "training"
    """training, joining, reducing, voting or recovering."""
    plan: RoundPlan | None = None
    vote: RoundVote | None = None
    lease: Lease | None = None
    """What it trains on."""
    read: Lease | None = None
    """Where its data stood when it joined."""


@dataclass
class Group:
    """A job of `count` members with the model of its hub."""

    count: int
    least: int = 0
    machine: RoundMachine = field(init=False)
    now: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    votes_sent: dict[int, list[RoundVote]] = field(default_factory=dict)
    checkpoint: tuple[int, str, dict[int, int]] = (0, "start", {})
    counted: dict[int, int] = field(default_factory=dict)
    """How much of each slot is in the present history."""
    rewinds: int = 0
    cut_off: dict[str, Process] = field(default_factory=dict)
    """Processes that live, but that the hub takes for lost."""
    means: dict[int, list[str]] = field(default_factory=dict)
    spans: dict[tuple[int, str], tuple[Lease, Lease]] = field(default_factory=dict)
    """What each member of an attempt has read: from, to."""

    def __post_init__(self) -> None:
        self.machine = RoundMachine(
            "j",
            nodes_wanted=self.count,
            min_nodes=self.least,
            preference="relay",
            reducer_ready=True,
            commit_log=CommitLog(data_slots=DataSlots(self.count)),
        )
        for slot in range(self.count):
            self.machine.expect(f"w{slot}")
            self.enter(f"w{slot}")

    # ------------------------------------------------------------------- what hubs do

    def take(self, effects: list[Effect]) -> None:
        """Check and carry out what follows."""
        for effect in effects:
            if isinstance(effect, Planned):
                self.planned(effect.plan)
            elif isinstance(effect, Decided):
                self.decided(effect)
            elif isinstance(effect, Refused):
                if effect.member in self.processes:
                    self.processes[effect.member].doing = "lost-touch"
            elif isinstance(effect, MemberDropped):
                assert effect.member not in self.machine.waits_for()
            else:
                assert not isinstance(effect, StateAdopted)

    def planned(self, plan: RoundPlan) -> None:
        assert plan.epoch not in self.verdicts
        assert plan.epoch > max(self.verdicts, default=0)
        states = {self.processes[m].state for m in plan.members if m in self.processes}
        assert len(states) <= 1, "members of a plan stand on different states"
        for member in plan.members:
            process = self.processes[member]
            assert process.read is not None
            lease = process.lease or Lease(int(member[1:]))
            self.spans[plan.epoch, member] = (lease, process.read)
            if process.doing == "joining":
                process.doing, process.plan = "reducing", plan

    def decided(self, effect: Decided) -> None:
        verdict, plan = effect.verdict, effect.plan
        assert verdict.epoch not in self.verdicts, "two verdicts for an epoch"
        self.verdicts[verdict.epoch] = verdict
        slots = [lease.slot for lease in verdict.leases.values()]
        assert len(slots) == len(set(slots)), "a slot has two holders"
        if verdict.committed:
            self.tally(verdict)
            votes = self.votes_sent.get(verdict.epoch, [])
            agreed = [v for v in votes if v.ok and v.digest == verdict.digest]
            assert agreed
            assert all(v.contributors == verdict.contributors for v in agreed)
            assert self.machine.committed_round == verdict.round + 1
            there = max(len(verdict.contributors), len(self.machine.members.up_to_date))
            assert there >= self.least, "fewer than the least number met"
        for member in plan.members:
            process = self.processes.get(member)
            if process is not None and process.doing == "voting" and process.plan == plan:
                self.hear(process, member, verdict)

    def tally(self, verdict: Verdict) -> None:
        """Check that nothing that is in the mean was in an earlier one."""
        for member in verdict.contributors:
            start, end = self.spans[verdict.epoch, member]
            slot = start.slot
            assert start.cursor.get("offset", 0) >= self.counted.get(slot, 0), "counted twice"
            self.counted[slot] = end.cursor["offset"]

    def hear(self, process: Process, member: str, verdict: Verdict) -> None:
        """A member gets the verdict on the attempt that it voted on."""
        vote = process.vote
        assert vote is not None
        process.doing = "training"
        if verdict.committed and vote.ok and vote.digest == verdict.digest:
            process.round, process.state = verdict.round + 1, verdict.digest
            process.lease = verdict.leases.get(member, process.read)
        elif verdict.committed:
            process.doing = "lost-touch"

    def restart(self) -> None:
        """The hub dies and starts again from its record."""
        old = self.machine
        commit_log = CommitLog(old.commit_log.timings, DataSlots(self.count))
        commit_log.data_slots.cursors = dict(old.commit_log.data_slots.cursors)
        commit_log.data_slots.hold_only(old.commit_log.data_slots.held)
        self.machine = RoundMachine(
            "j",
            nodes_wanted=self.count,
            min_nodes=self.least,
            preference="relay",
            reducer_ready=old.reducer_ready,
            committed_round=old.committed_round,
            epoch=old.epoch,
            starting=old.starting,
            unproved=True,
            paused=old.paused,
            commit_log=commit_log,
        )
        self.machine.members.outsiders = set(old.members.outsiders)
        for member in self.cut_off:
            self.machine.members.states[member] = RoundMemberState.GONE
            if old.members.knows(member):
                self.machine.members.recorded.add(member)
        for member, process in self.processes.items():
            self.machine.members.states[member] = RoundMemberState.LIVE
            if self.machine.recovers:
                self.machine.members.recorded.add(member)
            if process.doing in ("joining", "reducing"):
                process.doing = "training"  # it asks again
        if old.attempt is not None and old.plan is not None:
            self.machine.reopen(old.plan, self.now, old.attempt.joins)
            for member in sorted(set(old.plan.members) - self.processes.keys()):
                self.take(self.machine.gone(member, self.now))
        for member, process in self.processes.items():
            if process.doing == "voting":
                self.send_vote(member, process)

    # ---------------------------------------------------------------- what members do

    def enter(self, member: str) -> None:
        """A process starts and registers."""
        self.processes[member] = process = Process()
        self.machine.register(member, dial=[])
        if self.machine.recovers:
            process.doing = "lost-touch"

    def mend(self, member: str) -> None:
        """A process that was taken for lost is back, and asks again what it had requested."""
        self.processes[member] = process = self.cut_off.pop(member)
        self.machine.back(member)
        if process.doing == "voting":
            self.send_vote(member, process)
        elif process.doing in ("joining", "reducing"):
            process.doing = "training"

    def relaunch(self, member: str) -> None:
        if member not in self.processes:
            self.cut_off.pop(member, None)
            self.machine.launch(member)
            self.enter(member)

    def step(self, member: str, *, good: bool) -> None:
        """One member does what is next for it."""
        process = self.processes.get(member)
        if process is None or process.frozen:
            return
        if process.doing == "training":
            self.send_join(member, process)
        elif process.doing == "reducing":
            self.reduce(member, process, good=good)
        elif process.doing == "lost-touch":
            process.doing = "recovering"
            self.take(self.machine.recover(member, self.now))
        elif process.doing == "recovering":
            self.take_over(member, process, good=good)

    def send_join(self, member: str, process: Process) -> None:
        process.doing = "joining"
        lease = process.lease or Lease(int(member[1:]))
        offset = lease.cursor.get("offset", 0) + 10
        process.read = Lease(lease.slot, {"data_pass": 0, "offset": offset})
        join = RoundJoin(process.round, process.state, lease=process.read)
        try:
            effects = self.machine.join(member, join, self.now)
        except LeftBehind:
            process.doing = "lost-touch"
            return
        if self.machine.attends(member) and not effects:
            process.doing, process.plan = "reducing", self.machine.plan
        self.take(effects)

    def reduce(self, member: str, process: Process, *, good: bool) -> None:
        plan = process.plan
        assert plan is not None
        digest = f"{process.state}+{plan.epoch}" if good else ""
        process.vote = RoundVote(
            plan.round,
            plan.epoch,
            good,
            digest,
            self.reached(plan) if good else [],
            "" if good else "bad luck",
            process.read,
        )
        process.doing = "voting"
        self.send_vote(member, process)

    def reached(self, plan: RoundPlan) -> list[str]:
        """Return whose contributions are in the mean: of those that lived when it was made."""
        if plan.epoch not in self.means:
            self.means[plan.epoch] = [
                m for m in plan.members if m in self.processes and not self.processes[m].frozen
            ]
        return self.means[plan.epoch]

    def send_vote(self, member: str, process: Process) -> None:
        vote = process.vote
        assert vote is not None
        known = self.verdicts.get(vote.epoch)
        if known is not None:
            self.hear(process, member, known)
            return
        self.votes_sent.setdefault(vote.epoch, []).append(vote)
        try:
            self.take(self.machine.vote(member, vote, self.now))
        except GroupError:
            process.doing = "training"  # it joins again

    def take_over(self, member: str, process: Process, *, good: bool) -> None:
        """Take the committed state over from a source that has it."""
        if self.machine.plan is not None:
            return  # the answer waits for the verdict
        holders = self.machine.members.holders(member, [])
        usable = [
            m
            for m in holders
            if m in self.processes and self.processes[m].round == self.machine.committed_round
        ]
        if not good or (holders and not usable):
            process.doing = "lost-touch"
            return
        if usable:
            donor = self.processes[usable[0]]
            process.round, process.state = donor.round, donor.state
        else:
            self.rewind(process)
        process.lease = self.machine.commit_log.data_slots.lease(member)
        try:
            effects = self.machine.stand(member, process.round, process.state, self.now)
        except LeftBehind:
            process.doing = "lost-touch"
            return
        process.doing = "training"
        self.take(effects)

    def rewind(self, process: Process) -> None:
        assert not any(
            p.round == self.machine.committed_round and m in self.machine.members.up_to_date
            for m, p in self.processes.items()
        ), "somebody had the state"
        round_, state, counted = self.checkpoint
        if self.machine.committed_round != round_:
            self.rewinds += 1
            cursors = {slot: {"data_pass": 0, "offset": end} for slot, end in counted.items()}
            self.machine.rewind(round_, cursors)
            self.counted = dict(counted)
        process.round, process.state = round_, state

    # -------------------------------------------------------------------- what happens

    def act(self, action: str, member: str, good: bool) -> None:
        """Let something happen; what cannot happen now does not."""
        if action == "go":
            self.step(member, good=good)
        elif action == "all":
            for name in list(self.processes):
                self.step(name, good=True)
        elif action == "wait":
            self.wait(8.0)
        elif action == "restart":
            self.restart()
        elif action == "relaunch":
            self.relaunch(member)
        elif action == "mend" and member in self.cut_off:
            self.mend(member)
        elif action == "save":
            self.save()
        elif member in self.processes:
            self.befall(action, member)

    def befall(self, action: str, member: str) -> None:
        """Let something happen to a process."""
        process = self.processes[member]
        if action == "freeze":
            process.frozen = not process.frozen
        elif action == "again" and process.doing == "joining":
            self.send_join(member, process)
        elif action in ("die", "cut"):
            del self.processes[member]
            if action == "cut":
                self.cut_off[member] = process
            self.take(self.machine.gone(member, self.now))
        elif action == "leave":
            self.take(self.machine.leave(member, self.now))
            del self.processes[member]
            assert member not in self.machine.waits_for()

    def save(self) -> None:
        for process in self.processes.values():
            if process.round == self.machine.committed_round:
                self.checkpoint = (process.round, process.state, dict(self.counted))
                return

    def wait(self, seconds: float) -> None:
        """Let time go by, as the hub does: silence is noticed, then graces and deadlines."""
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_S
            for member in self.machine.waits_for():
                process = self.processes.get(member)
                if process is None or process.frozen:
                    self.take(self.machine.silent(member, self.now))
                    assert member not in self.machine.waits_for()
            self.take(self.machine.settle(self.now))
