"""Which machine runs which member: the hub's own placement, on virtual time.

The job's record, what it demands, what a machine has left, the assignment and the pauses before a
member is launched again are the functions of `hub/scheduler` and `hub/jobs`; here they are called
when a machine has come or a member has ended, and once a second while a pause lasts, as by the hub.
A machine without room cannot be assigned, and of demands that are alike the first ones are served:
so only free machines are shown, and no more demands than those. A test compares with the hub.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atoll.config import JobSpec
from atoll.config.tables import JobTable
from atoll.hub.jobs.completion import RestartPolicy, failures_after, outcome
from atoll.hub.jobs.members import next_attempt
from atoll.hub.jobs.record import Job, Member
from atoll.hub.scheduler.assign import WHOLE, Demand, assign
from atoll.hub.scheduler.requests import LiveProcesses, demand_of, demand_of_all, given_up, is_due
from atoll.hub.scheduler.resources import Capacity, mismatch, request_of
from atoll.ids import member_id
from atoll.simulate.record import Record
from atoll.simulate.scheduler import BEGIN_S, Alarm, Scheduler
from atoll.simulate.setting import Profile, Setting
from atoll.wire.messages import NodeInfo
from atoll.wire.states import JobState, MemberState

JOB = "simulated"
TICK_S = 1.0
"""The hub looks at pauses so often."""
PLENTY = 2**50
"""Of what the file of machines does not say."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A member that starts on a machine."""

    member: str
    slot: int
    attempt: int
    machine: str


class Placement:
    """See the module's docstring."""

    def __init__(
        self, scheduler: Scheduler, setting: Setting, record: Record, *,
        may_return: Callable[[], bool], launch: Callable[[Launch], None],
    ) -> None:  # fmt: skip
        """`may_return`: see `RestartPolicy.due`; `launch` starts a process."""
        self._scheduler, self._record = scheduler, record
        self._may_return, self._launch = may_return, launch
        table = JobTable(
            name=JOB, nodes=setting.wanted, min_nodes=setting.min_members, on=list(setting.on)
        )
        self.job = Job(job=JOB, created=0.0, spec=JobSpec(job=table, needs=setting.needs))
        self.least = 0
        """Fewest members with a place since the job has begun; 0: it has not."""
        self.ended = ""
        """Why the job has ended; empty: it has not."""
        self._policy = RestartPolicy(clock=scheduler)
        self._infos: dict[str, NodeInfo] = {}
        self._free: dict[str, None] = {}
        """Connected machines without a member."""
        self._stats: dict[str, dict[str, float]] = {}
        self._connected: set[str] = set()
        self._hosting: dict[str, str] = {}
        """Machine -> the member that lives on it, as far as is known."""
        self._lacking: dict[int, None] = dict.fromkeys(range(setting.wanted))
        """Slots whose members should run and do not, as `completion.missing` finds them."""
        self._ended_on: dict[str, dict[str, None]] = {}
        """Machine -> members whose last process has ended there."""
        self._want = request_of(self.job.spec)
        self._fits: dict[str, bool] = {}
        """Whether a member fits on a machine that is there and has none."""
        self._troubled: set[str] = set()
        """Members whose launches have failed since the last round."""
        self._looking: Alarm | None = None
        self._begun_s, self._counted_s, self._member_s = math.nan, 0.0, 0.0

    def know(self, profile: Profile) -> None:
        """Take a machine of the fleet into the world."""
        self._infos[profile.name] = NodeInfo(
            profile.name, "Linux", "", "", cores=PLENTY, slots=1, disk_free_bytes=PLENTY,
            memory_bytes=int(profile.memory_bytes) or PLENTY,
        )  # fmt: skip
        self._stats[profile.name] = {"up_bps": profile.up_bps, "down_bps": profile.down_bps}

    def unfit(self) -> list[str]:
        """Return why machines can never run a member, each beginning with its name."""
        places = [self._place_of(machine) for machine in self._infos]
        return [why for place in places if (why := mismatch(self._want, place))]

    # ------------------------------------------------------------------------------- events

    def came(self, machine: str) -> None:
        """A machine has connected; `place` is called next."""
        self._connected.add(machine)
        self._release(machine)

    def went(self, machine: str) -> None:
        """A machine is connected no longer: who was lost on it need not be waited for."""
        self._connected.discard(machine)
        self._free.pop(machine, None)
        self._look_again()

    def connected(self, member: str, attempt: int) -> bool:
        """The process of a member registers; return whether it is neither lost nor replaced."""
        process = self.job.members[member]
        if process.attempt != attempt or not process.live:
            return False
        process.state, process.incarnation = MemberState.RUNNING, f"{attempt}"
        return True

    def lost(self, member: str, attempt: int, *, left: bool = False) -> None:
        """The process of a member is known to be lost, or has `left` on purpose."""
        process = self.job.members.get(member)
        if process is None or process.attempt != attempt or not process.live:
            return
        self._count()
        process.state = MemberState.LEFT if left else MemberState.LOST
        self._lacking[process.slot] = None
        self._hosting.pop(process.node, None)
        self._ended_on.setdefault(process.node, {})[member] = None
        self.least = min(self.least, self.present)
        self._release(process.node)
        if not given_up(process, self.job):
            self._due(process)  # its pause begins now

    def back(self, member: str, attempt: int) -> bool:
        """A process that was lost is there again; return whether nothing has replaced it."""
        process = self.job.members[member]
        if process.attempt != attempt or process.state != MemberState.LOST:
            return False
        self._count()
        process.state, process.incarnation = MemberState.RUNNING, f"{attempt}"
        self._policy.absent(self.job)  # forgets since when it was missing
        self._lacking.pop(process.slot, None)
        self._free.pop(process.node, None)
        self._ended_on[process.node].pop(member, None)
        self._hosting[process.node] = member
        return True

    def committed(self, members: Iterable[str]) -> None:
        """A round was committed with these members' contributions."""
        self.job.committed_round += 1
        for member in self._troubled.intersection(members):
            self.job.members[member].failures = 0
            self._troubled.discard(member)

    def member_on(self, machine: str) -> str:
        """Return the member that lives on a machine, as far as is known; empty: none."""
        return self._hosting.get(machine, "")

    def _release(self, machine: str) -> None:
        """A machine can take a member, if it is there, has none and fits at all."""
        if machine in self._connected and machine not in self._hosting:
            if machine not in self._fits:
                self._fits[machine] = not mismatch(self._want, self._place_of(machine))
            if self._fits[machine]:
                self._free[machine] = None

    # ------------------------------------------------------------------------------ placing

    def place(self) -> None:
        """Start the job or its missing members, as far as machines are free."""
        if self.ended:
            return
        for launch in self._start() if self.job.state == JobState.WAITING else self._complete():
            self._record.placed.append((self._scheduler.now - BEGIN_S, launch.member,
                                        launch.machine))  # fmt: skip
            self._launch(launch)
        self._look_again()

    def _start(self) -> list[Launch]:
        demand = demand_of_all(self.job, number=0)
        nodes = assign([demand], map(self._place_of, self._free)).granted.get((JOB, WHOLE), [])
        if nodes:
            self.job.state = JobState.RUNNING
            self._begun_s = self._counted_s = self._scheduler.now
            self.least = len(nodes)
        return [self._assigned(slot, node) for slot, node in enumerate(nodes)]

    def _complete(self) -> list[Launch]:
        free = [machine for machine in self._free if not self._is_kept(machine)]
        asks = self._demands(len(free)) if free else []
        granted = assign(asks, map(self._place_of, free)).granted if asks else {}
        return [self._assigned(slot, nodes[0]) for (_, slot), nodes in granted.items()]

    def _is_kept(self, machine: str) -> bool:
        """Return whether a member keeps its place there, for it starts again after a pause."""
        ended = [self.job.members[member] for member in self._ended_on.get(machine, ())]
        return any(not given_up(m, self.job) and not self._due(m) for m in ended)

    def _demands(self, most: int) -> list[Demand]:
        """Return what the job demands, at most so many, the first to be served first."""
        asks: list[Demand] = []
        living = LiveProcesses(whole=self.present, beside={}, there={})
        for slot in sorted(self._lacking):
            process = self.job.members.get(member_id(slot))
            if process is None or (not given_up(process, self.job) and self._due(process)):
                names = [member_id(slot)]
                asks.append(demand_of(self.job, slot, names, number=0, living=living))
                if len(asks) == most:
                    break
        return asks

    def _due(self, process: Member) -> bool:
        return is_due(
            self._policy, self.job, process, node_is_there=process.node in self._connected,
            may_return=self._may_return,
        )  # fmt: skip

    def _place_of(self, machine: str) -> Capacity:
        return Capacity(node=machine, info=self._infos[machine], stats=self._stats[machine])

    def _assigned(self, slot: int, node: str) -> Launch:
        name = member_id(slot)
        before = self.job.members.get(name)
        failures = failures_after(before) if before else 0
        process = next_attempt(self.job, name, slot=slot, node=node, failures=failures)
        self._count()
        self.job.members[name] = process
        self._policy.launched(JOB, process)
        if failures:
            self._troubled.add(name)
        if before is not None:
            self._ended_on[before.node].pop(name, None)
        del self._lacking[slot], self._free[node]
        self._hosting[node] = name
        return Launch(name, slot, process.attempt, node)

    def _look_again(self) -> None:
        """Look again with the hub's next tick if a launch may be due by then."""
        if self.job.state == JobState.RUNNING and not self.present:
            self._see_if_over()
        if self._looking is not None or not self._may_launch():
            return
        now = self._scheduler.now - BEGIN_S
        next_s = BEGIN_S + (math.floor(now / TICK_S) + 1) * TICK_S

        def look() -> None:
            self._looking = None
            self.place()

        self._looking = self._scheduler.at(next_s, look)

    def _may_launch(self) -> bool:
        """Return whether a machine is free that `place` has left because of a pause."""
        if self.job.state != JobState.RUNNING or not self._free or self.ended:
            return False
        members = (self.job.members.get(member_id(slot)) for slot in self._lacking)
        return any(m is not None and not given_up(m, self.job) for m in members)

    def _see_if_over(self) -> None:
        """End the job if none of its members is launched again, as the hub does."""
        members = self.job.members.values()
        if members and all(given_up(member, self.job) for member in members):
            end = outcome(self.job)
            self.ended = end[1] if end is not None else ""

    # ------------------------------------------------------------------------------- counts

    @property
    def begun(self) -> bool:
        """Whether the job has started."""
        return self.job.state != JobState.WAITING

    @property
    def present(self) -> int:
        """Members that have a place."""
        return self.job.nodes_wanted - len(self._lacking)

    def _count(self) -> None:
        """Add up the time until now, before the number of members changes."""
        now = self._scheduler.now
        if not math.isnan(self._begun_s):
            self._member_s += (now - self._counted_s) * self.present
            self._counted_s = now

    def mean_members(self) -> float:
        """Return how many members had a place on average since the job has begun; 0: it has not."""
        self._count()
        seconds = self._scheduler.now - self._begun_s
        return self._member_s / seconds if seconds > 0 else 0.0
