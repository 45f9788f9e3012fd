"""Records of jobs and members, changed through `Jobs` only; checks of labels, files and changes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from atoll.config import JobSpec, parse_spec, sent_hashes
from atoll.config.rl_roles import ACTOR, MemberRole, member_roles
from atoll.config.tables import TrainTable
from atoll.errors import ConfigError
from atoll.hub.jobs.descriptions import (
    describe_inner,
    describe_island,
    describe_method,
    describe_roles,
    describe_work,
)
from atoll.hub.storage.files import plain
from atoll.ids import check_name, is_follower, member_id
from atoll.rounds.timing import RoundTimings
from atoll.wire.states import JobState, MemberState

SILENT_KINDS = frozenset({"command", "container"})
"""Kinds of job with processes that need not register with the hub."""


class Member(msgspec.Struct, kw_only=True):
    """One process of a job: a member, or a follower on a further machine of its island."""

    member: str
    slot: int
    node: str
    state: MemberState = MemberState.ASSIGNED
    attempt: int = 1
    """Number of launches so far."""
    failures: int = 0
    """Consecutive launches that ended without a committed round."""
    retried: int = 0
    """Restarts after failures of its own program."""
    incarnation: str = ""
    in_rounds: bool = False
    """It has taken part in rounds, now or in an earlier attempt: its work is the group's."""
    leaving: bool = False
    """It reported that it leaves for good."""
    dial: list[str] = []
    """host:port of its store."""
    serves: list[str] = []
    """host:port where it serves the committed state."""
    identity: str = ""
    """Fingerprint of the key with which it authenticates to other members."""
    exit_code: int | None = None
    error: dict[str, str] | None = None
    tail: list[str] = []
    """Its last lines of output, if it failed."""
    collecting: bool = False
    """Its process has failed and its artifacts are still being uploaded."""
    result: dict[str, Any] | None = None

    @property
    def live(self) -> bool:
        """Whether its process runs or is about to run."""
        return self.state.live


class Job(msgspec.Struct, kw_only=True):
    """The record of a job. Change it through `Jobs` only."""

    job: str
    created: float
    spec: JobSpec = msgspec.field(default_factory=JobSpec)
    """The job file, parsed once: when the job is submitted, changed or loaded."""
    text: str = ""
    """The job file as TOML with every default written out."""
    files: list[str] = []
    """Names of the texts sent with it."""
    followers: dict[str, Member] = {}
    """Further machines of islands, by name: not members; `slot` is that of their member."""
    by: str = ""
    """Name of the login that submitted it; empty: not known."""
    batch: str = ""
    """Label of jobs submitted together."""
    key: str = ""
    """Idempotency key of the submission."""
    state: JobState = JobState.WAITING
    reason: str = ""
    error: dict[str, str] | None = None
    members: dict[str, Member] = {}
    committed_round: int = 0
    start_round: int = 0
    """`committed_round` when it was started or resumed."""
    paused: str = ""  # why it is paused; empty: it is not
    trouble: str = ""
    """Why the hub cannot store its progress now, so that it waits; in memory only."""
    without_room: set[str] = set()
    """Members that wait until the hub's disk has room for what they trained; in memory only."""
    data_slots: int = 0
    """Slots that the data is sharded into, if not `nodes_wanted`: members came or went since."""
    rescaling: bool = False
    """It stops only to go on with its data sharded anew."""
    leases: dict[int, dict[str, int]] = {}
    """Committed position of every data slot."""
    measures: RoundTimings = msgspec.field(default_factory=RoundTimings)
    outsiders: dict[str, int] = {}
    """Launches from before it was reset to a checkpoint; they have another history."""
    reducer_attempt: int = 0
    """Launches of its reducer so far."""
    aborted_rounds: int = 0
    started: float | None = None
    ended: float | None = None
    trained_s: float = 0.0
    trains_since: float | None = None
    """See `times.py`."""
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
        """Number of members that train together."""
        return self.spec.job.nodes

    @property
    def min_nodes(self) -> int:
        """It pauses below this number; 0: all are needed to start, one to continue."""
        return self.spec.job.min_nodes

    @property
    def machines(self) -> int:
        """Hosts of each member: its own, and its follower hosts."""
        return self.spec.island.machines

    @property
    def processes(self) -> list[Member]:
        """Its members and their followers: all processes that take places on nodes."""
        return [*self.members.values(), *self.followers.values()]

    def process(self, name: str) -> Member | None:
        """Return the record of a member or a follower; None if it does not exist."""
        return (self.followers if is_follower(name) else self.members).get(name)

    @property
    def origin(self) -> str:
        """Where it continues from without a checkpoint, for people."""
        return "where each of its members stood" if self.kind == "rl" else "the beginning"

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state.ended

    @property
    def slots(self) -> int:
        """Number of data slots."""
        return self.data_slots or self.nodes_wanted

    @property
    def silent(self) -> bool:
        """Whether its processes may never register with the hub: their node reports their state."""
        return self.kind in SILENT_KINDS

    @property
    def separate(self) -> bool:
        """Whether its processes work independently instead of meeting in rounds."""
        return self.of_policies or (self.silent and self.committed_round == 0)

    @property
    def of_policies(self) -> bool:
        """Whether it is an [rl] job: its members are actors, and possibly a critic."""
        return self.kind == "rl"

    @property
    def _roles(self) -> list[MemberRole]:
        return member_roles(self.spec.rl) if self.of_policies else []

    @property
    def aside(self) -> frozenset[str]:
        """Members that take no part in rounds: the critic, if there is one."""
        return frozenset(
            member_id(slot) for slot, role in enumerate(self._roles) if role.role != ACTOR
        )


LINES_SHOWN = 20
"""Last lines of a failed process in its job's view; the member's view has all that are kept."""


def job_facts(job: Job) -> dict[str, Any]:
    """Return the placement facts of a job, and the failed process, if any."""
    members = sorted(job.members.values(), key=lambda member: member.slot)
    processes = sorted(job.processes, key=lambda process: process.slot)  # stable: members first
    live = [process for process in processes if process.live]
    failed = culprit(job)
    return {
        "kind": job.kind,
        "work": describe_work(job.spec),
        "method": describe_method(job.spec),
        "by": job.by,
        "roles": describe_roles(job.spec),
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
        "last_lines": failed.tail[-LINES_SHOWN:] if failed else [],
        "error": _whole_error(job, failed),
    }


def steps_of(spec: JobSpec) -> int:
    """Return the steps of a job: 0 if unknown; of an [rl] job the most of one policy.

    A script decides itself when it ends, unless its job file changes `steps` from the default.
    """
    if spec.kind == "rl":
        return max((role.steps for role in member_roles(spec.rl)), default=0)
    undeclared = spec.job.script and spec.train.steps == TrainTable().steps
    return 0 if spec.job.command or undeclared else spec.train.steps


def policy_steps(job: Job, steps: Mapping[int, int]) -> int:
    """Return the progress of all policies of a job together, as a share of its steps.

    Args:
        job: An [rl] job.
        steps: Slot -> steps of that member so far.
    """
    done: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for slot, role in enumerate(member_roles(job.spec.rl)):
        if role.role == ACTOR:
            done[role.policy] = done.get(role.policy, 0) + steps.get(slot, 0)
            wanted[role.policy] = role.steps
    total = sum(wanted.values())
    counted = sum(min(count, wanted[name]) for name, count in done.items())
    return steps_of(job.spec) * counted // total if total else 0


def _whole_error(job: Job, failed: Member | None) -> dict[str, Any] | None:
    """Return the error of a job with the place of the failure, exit status and last lines."""
    if job.error is None:
        return None
    error = {**job.error, "remedy": whole_remedy(job.job, job.error.get("remedy", ""))}
    if failed is None:
        return error
    return {
        **error,
        "member": failed.member,
        "node": failed.node,
        "exit_code": failed.exit_code,
        "last_lines": failed.tail[-LINES_SHOWN:],
    }


def whole_remedy(job: str, remedy: str) -> str:
    """Return a remedy whose commands name the job: a process does not know its name."""
    return f"{remedy} {job}" if remedy.endswith("atoll logs") else remedy


def culprit(job: Job) -> Member | None:
    """Return the process that ended a job by its failure, or the last one that failed."""
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
"""Total size of the texts sent with a job; larger data is uploaded as files."""


def check_files(files: dict[str, str]) -> None:
    """Refuse file names outside the job's folder, and too much text.

    Raises:
        ConfigError: says which.
    """
    if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_FILES_BYTES:
        raise ConfigError(
            "too many files are sent with this job",
            given=f"{len(files)} files, {sum(map(len, files.values()))} characters",
            expected=f"at most {MAX_FILES} files and {MAX_FILES_BYTES} characters in all",
        )
    reserved = {"job.toml", "events.jsonl", "metrics.jsonl"}
    for name in files:
        with contextlib.suppress(ConfigError):
            check_name("file", name.lower())
            if plain(name) not in reserved:
                continue
        raise ConfigError(
            "this file name cannot be sent with a job",
            given=repr(name),
            expected="a plain name such as train.py, without folders",
        )


_PACK = re.compile(r"sha256:([0-9a-f]{64})")
_LABEL = re.compile(r"[ -~]{0,128}")


def code_of(spec: JobSpec) -> str:
    """Return the SHA-256 of the pack with a job's code; empty: it has none.

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


def blobs_of(spec: JobSpec) -> list[str]:
    """Return the SHA-256 of all that was sent with a job; raises as :func:`code_of`."""
    return [found for found in (code_of(spec), *sent_hashes(spec)) if found]


def check_labels(*, batch: str, key: str) -> None:
    """Refuse labels that cannot be displayed.

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
    """Return the changed job, if it can continue from the old one's state.

    The number of nodes, the strategy, the steps and the checkpoints may change; what defines the
    state may not.

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
