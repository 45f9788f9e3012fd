"""What is known of a job and of its members; changed through `Jobs` only.

What people are told of a job beside its training: where it is placed, and how it failed.

Which texts may travel with a job.

Which changes of a job file a job can go on with from its checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from atoll.config import JobSpec, parse_spec
from atoll.config.rl_roles import ACTOR, Seat, seats
from atoll.errors import ConfigError, unknown
from atoll.ids import check_name, is_follower, member_id
from atoll.rounds.timing import RoundTimings
from atoll.wire.states import JobState, MemberState

SILENT_KINDS = frozenset({"command", "container"})
"""Kinds of job whose processes need not speak to the hub."""


class Member(msgspec.Struct, kw_only=True):
    """One training process of a job, or its reducer."""

    member: str
    slot: int
    node: str
    state: MemberState = MemberState.ASSIGNED
    attempt: int = 1
    """Launches so far; grows when it is placed again."""
    failures: int = 0
    """Launches in a row that ended before a round was committed with them."""
    retried: int = 0
    """How often it was started again because its own program had failed."""
    incarnation: str = ""
    leaving: bool = False
    """It told that it leaves for good."""
    dial: list[str] = []
    """host:port where its store listens."""
    serves: list[str] = []
    """host:port where it serves the committed state."""
    exit_code: int | None = None
    error: dict[str, str] | None = None
    tail: list[str] = []
    """Last lines it printed, when it failed."""
    collecting: bool = False
    """Its process has failed, and artifacts of it are still on their way to the hub."""
    result: dict[str, Any] | None = None

    @property
    def live(self) -> bool:
        """Whether its process runs or is about to."""
        return self.state.live


class Job(msgspec.Struct, kw_only=True):
    """The whole record of a job. Change it through `Jobs` only."""

    job: str
    created: float
    spec: JobSpec = msgspec.field(default_factory=JobSpec)
    """The job file, parsed once: when the job is submitted, changed or loaded."""
    text: str = ""
    """The job file as TOML with every default written out."""
    files: list[str] = []
    """Names of the texts that travel with it."""
    followers: dict[str, Member] = {}
    """The further machines of islands, by name: no members, so no round and no rule of the job
    knows of them; `slot` is that of their member."""
    batch: str = ""
    """Label of the jobs that were submitted together."""
    key: str = ""
    """What the submitter called this submission; the same again is the same job."""
    state: JobState = JobState.WAITING
    reason: str = ""
    error: dict[str, str] | None = None
    members: dict[str, Member] = {}
    committed_round: int = 0
    start_round: int = 0
    """What `committed_round` was when it was started or resumed."""
    paused: str = ""
    """Why it does not go on just now."""
    deal: int = 0
    """Into how many slots the data is dealt, if not `nodes_wanted`: members came or went since."""
    rescaling: bool = False
    """It stops only to go on with another deal of the data."""
    leases: dict[int, dict[str, int]] = {}
    """Where every slot of the data stands in the committed record."""
    measures: RoundTimings = msgspec.field(default_factory=RoundTimings)
    outsiders: dict[str, int] = {}
    """Launches from before it was set back to a checkpoint; they have another history."""
    reducer_attempt: int = 0
    """Launches of its reducer so far."""
    aborted_rounds: int = 0
    started: float | None = None
    ended: float | None = None
    resume_round: int = -1
    stopping: bool = False
    grace_s: float = 10.0
    result: dict[str, Any] = {}

    @property
    def kind(self) -> str:
        """`trainer`, `rl`, `script`, `command` or `container`."""
        return self.spec.kind

    @property
    def nodes_wanted(self) -> int:
        """How many members train together."""
        return self.spec.job.nodes

    @property
    def min_nodes(self) -> int:
        """Below so many members it pauses; 0: all are needed to start, one to go on."""
        return self.spec.job.min_nodes

    @property
    def machines(self) -> int:
        """Hosts of each member: its own, and its follower hosts."""
        return self.spec.island.machines

    @property
    def processes(self) -> list[Member]:
        """Its members and their followers: all that takes places on nodes."""
        return [*self.members.values(), *self.followers.values()]

    def process(self, name: str) -> Member | None:
        """Return the record of a member or a follower, if there is one."""
        return (self.followers if is_follower(name) else self.members).get(name)

    @property
    def origin(self) -> str:
        """From where it goes on that has no checkpoint, for people."""
        return "where each of its members stood" if self.kind == "rl" else "the beginning"

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state.ended

    @property
    def slots(self) -> int:
        """Into how many slots the data is dealt."""
        return self.deal or self.nodes_wanted

    @property
    def silent(self) -> bool:
        """Whether its processes may never speak to the hub: their node tells how they fare."""
        return self.kind in SILENT_KINDS

    @property
    def separate(self) -> bool:
        """Whether each of its processes works for itself, instead of meeting in rounds."""
        return self.of_policies or (self.silent and self.committed_round == 0)

    @property
    def of_policies(self) -> bool:
        """Whether its members are actors of policies, and maybe a critic."""
        return self.kind == "rl"

    @property
    def _roles(self) -> list[Seat]:
        return seats(self.spec.rl) if self.of_policies else []

    @property
    def aside(self) -> frozenset[str]:
        """Members that take no part in rounds, if there are any: the critic of policies."""
        return frozenset(
            member_id(slot) for slot, seat in enumerate(self._roles) if seat.role != ACTOR
        )


def change_fields(target: Any, changes: dict[str, Any], known: frozenset[str]) -> None:
    """Set fields of a record; a wrong name is a bug of the caller and changes nothing."""
    for name in changes:
        if name not in known:
            raise unknown(f"field of a {type(target).__name__.lower()}", name, known)
    for name, value in changes.items():
        setattr(target, name, value)


LINES_TOLD = 20
"""Last lines of a failed process in the view of its job; all that are kept are in the member's."""


def job_facts(job: Job) -> dict[str, Any]:
    """Return what placement knows of a job, and the process that failed, if one did."""
    members = sorted(job.members.values(), key=lambda member: member.slot)
    processes = sorted(job.processes, key=lambda process: process.slot)  # stable: hands come after
    live = [process for process in processes if process.live]
    failed = culprit(job)
    return {
        "kind": job.kind,
        "seats": describe_roles(job.spec),
        "island": describe_island(job.spec),
        "inner": describe_inner(job.spec),
        "priority": job.spec.job.priority,
        "retries": job.spec.job.retries,
        "retried": sum(member.retried for member in members),
        "batch": job.batch,
        "places": list(dict.fromkeys(process.node for process in live or processes)),
        "failed_member": failed.member if failed else "",
        "failed_node": failed.node if failed else "",
        "exit_code": failed.exit_code if failed else None,
        "last_lines": failed.tail[-LINES_TOLD:] if failed else [],
        "error": _whole_error(job, failed),
    }


def steps_of(spec: JobSpec) -> int:
    """Return how many steps a job has: 0 where nobody knows; of policies the most of one."""
    if spec.kind == "rl":
        return max((seat.steps for seat in seats(spec.rl)), default=0)
    return 0 if spec.job.command else spec.train.steps


def describe_roles(spec: JobSpec) -> list[dict[str, Any]]:
    """Return what each slot of a job does, where that is not the same."""
    return [dataclasses.asdict(seat) for seat in seats(spec.rl)] if spec.kind == "rl" else []


def describe_island(spec: JobSpec) -> str:
    """Return how each member lies over its processes; empty where it is one process."""
    if spec.mesh.ranks == 1:
        return ""
    machines = spec.island.machines
    return f"{spec.mesh} on {machines} machines" if machines > 1 else str(spec.mesh)


def describe_inner(spec: JobSpec) -> str:
    """Return how each member computes its steps; empty where one process does it plainly."""
    ranks, train = spec.mesh.ranks, spec.train
    words = [spec.strategy.inner or "local"] if not spec.job.script or spec.strategy.inner else []
    if ranks > 1:
        words.append(f"{ranks} ranks")
    if not (spec.job.script or spec.job.command or spec.kind == "rl"):  # those have their own
        words.append(train.precision)
        words += [f"recompute {train.recompute}"] if train.recompute != "none" else []
    plain = ranks == 1 and (train.precision, train.recompute) == ("fp32", "none")
    return "" if plain or spec.job.command or spec.kind == "rl" else ", ".join(words)


def describe_nodes(job: Job) -> str:
    """Return how many places a job wants, for people."""
    if job.machines == 1:
        return f"{job.nodes_wanted} nodes"
    return f"{job.nodes_wanted * job.machines} nodes, {job.machines} for each member"


def policy_steps(job: Job, steps: Mapping[int, int]) -> int:
    """Return how far the policies of a job are, all together: a share of its steps.

    Args:
        job: A job whose members have different things to do.
        steps: Slot -> steps of that member so far.
    """
    done: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for slot, seat in enumerate(seats(job.spec.rl)):
        if seat.role == ACTOR:
            done[seat.policy] = done.get(seat.policy, 0) + steps.get(slot, 0)
            wanted[seat.policy] = seat.steps
    total = sum(wanted.values())
    counted = sum(min(count, wanted[name]) for name, count in done.items())
    return steps_of(job.spec) * counted // total if total else 0


def _whole_error(job: Job, failed: Member | None) -> dict[str, Any] | None:
    """Return the error of a job with where it happened, the exit status and the last lines."""
    if job.error is None or failed is None:
        return job.error
    return {
        **job.error,
        "member": failed.member,
        "node": failed.node,
        "exit_code": failed.exit_code,
        "last_lines": failed.tail[-LINES_TOLD:],
    }


def culprit(job: Job) -> Member | None:
    """Return the process whose failure ended a job, or that failed last while it goes on."""
    failed = [process for process in job.processes if process.state == MemberState.FAILED]
    if job.error is not None:
        followers_first = [
            *job.followers.values(),
            *job.members.values(),
        ]  # which end their members
        same = [process for process in followers_first if process.error == job.error]
        failed = same or failed
    return failed[0] if failed else None


MAX_FILES = 64
MAX_FILES_BYTES = 8 * 2**20
"""Text that travels with a job, in all; larger things are put as files."""


def check_files(files: dict[str, str]) -> None:
    """Refuse file names that leave the job's folder, and too much text.

    Raises:
        ConfigError: says which.
    """
    if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_FILES_BYTES:
        raise ConfigError(
            "too many files travel with this job",
            given=f"{len(files)} files, {sum(map(len, files.values()))} characters",
            expected=f"at most {MAX_FILES} files and {MAX_FILES_BYTES} characters in all",
        )
    reserved = {"job.toml", "events.jsonl", "metrics.jsonl"}
    for name in files:
        with contextlib.suppress(ConfigError):
            check_name("file", name.lower())
            if name not in reserved:
                continue
        raise ConfigError(
            "this file name cannot travel with a job",
            given=repr(name),
            expected="a plain name such as train.py, without folders",
        )


_PACK = re.compile(r"sha256:([0-9a-f]{64})")
_LABEL = re.compile(r"[ -~]{0,128}")


def code_of(spec: JobSpec) -> str:
    """Return the SHA-256 of the pack that a job's code travels in; empty: it brings none.

    Raises:
        ConfigError: it names a folder: only a client can pack that.
    """
    if not spec.job.code:
        return ""
    found = _PACK.fullmatch(spec.job.code)
    if found is None:
        raise ConfigError(
            "the code of this job is not at the hub",
            given=f"code = {spec.job.code!r}",
            expected="sha256:HEX of a pack that was sent before",
            remedy="submit it with `atoll run`, which packs and sends the folder",
        )
    return found[1]


def check_labels(*, batch: str, key: str) -> None:
    """Refuse labels that nobody could show.

    Raises:
        ConfigError: says which.
    """
    for name, text in {"batch": batch, "key": key}.items():
        if not _LABEL.fullmatch(text):
            raise ConfigError(
                f"this {name} cannot be a label",
                given=repr(text[:200]),
                expected="at most 128 printable ASCII characters",
            )


def check_spec_change(old: JobSpec, text: str) -> JobSpec:
    """Return the changed job, if it can go on where the old one stands.

    The number of nodes, the strategy, the steps and the checkpoints may change; what the state is
    made of may not.

    Raises:
        ConfigError: the text is wrong, or changes what may not change; says which.
    """
    new = parse_spec(text)
    kept = {
        "[model]": (old.model, new.model),
        "[data]": (old.data, new.data),
        "seed in [job]": (old.job.seed, new.job.seed),
        "script in [job]": (old.job.script, new.job.script),
    }
    for name, (before, after) in kept.items():
        if before != after:
            raise ConfigError(
                f"{name} cannot change when a job is resumed",
                given=str(after),
                expected=str(before),
                remedy="submit it as a new job",
            )
    return new
