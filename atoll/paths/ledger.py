"""Phases of a job whose model has paths: who trains what, who has trained, who holds which module.

A phase begins when all members of the one before have met: then every path is assigned to a
member. A member that comes later waits for the next phase. When all that are left have trained, the
holders of each module meet in a round; the work of members that were lost before is missing in it,
and weights make up for that.

Between the beginning of a phase and its meeting no module changes. So a member that lacks a module
gets it from any of its holders, exactly as of this phase, and a module has one round per phase.

After the last phase the paths are assigned for their export, until all are exported.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from atoll.paths.assign import assign
from atoll.paths.layout import PathLayout
from atoll.paths.progress import PathProgress, note
from atoll.wire.paths import PathAsk, PathMeeting, PathShard, PathTrained, PathTurn


class PathRecord(msgspec.Struct):
    """What a hub keeps on disk of a ledger."""

    phase: int
    dealt: dict[str, list[int]] = {}
    lost: list[str] = []
    opened: bool = False
    rounds: dict[int, int] = {}
    source: int = -1
    processes: dict[str, str] = {}
    last: bool = False
    over: bool = False
    exported: list[int] = []
    versions: dict[int, int] = {}
    restored: list[int] = []
    history: int = 0
    best: dict[int, float] = {}
    missed: dict[int, dict[int, str]] = {}
    progress: dict[int, PathProgress] = {}
    shards: list[PathShard] = []
    phases: int = 0

    @property
    def assigned(self) -> dict[str, list[int]]:
        """Paths of each member in this phase; of those that were lost since none."""
        return {m: paths for m, paths in self.dealt.items() if m not in self.lost}


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """The part of a job that its ledger needs."""

    layout: PathLayout
    save_every: int = 0
    """Phases between two checkpoints; 0: an eighth of the run."""
    start_s: float = 120.0
    """How long the first phase waits for members that still start."""


CHECKPOINTS = 8
"""Approximate number per run, if the job sets no interval."""


@dataclass
class PathLedger:
    """See the module's docstring. Times are monotonic seconds."""

    settings: PathSettings
    phase: int
    """The present one, or the one to begin with."""
    expected: set[str]
    """Members that were launched, and have not sent a request yet."""
    began: float
    dealt: dict[str, list[int]] = field(default_factory=dict)
    """Paths of each member at the beginning of this phase."""
    lost: set[str] = field(default_factory=set)
    """Those of them that were lost since, or came back without what they did."""
    processes: dict[str, str] = field(default_factory=dict)
    """Which process of a member sent the last request, see `PathAsk`."""
    trained: set[str] = field(default_factory=set)
    """Those of them that have trained."""
    waiting: set[str] = field(default_factory=set)
    """Members that ask for a turn in the next phase; those that had one in this phase have met."""
    meets: dict[int, frozenset[str]] = field(default_factory=dict)
    """Members of each module's round, of the newest phase in which they met."""
    opened: bool = False
    """All have trained this phase: the holders of modules meet."""
    holds: dict[int, set[str]] = field(default_factory=dict)
    """Members that hold a module as of its last round."""
    fetching: dict[int, set[str]] = field(default_factory=dict)
    """Members that got donors of a module, and have not reported since whether they have it."""
    versions: dict[int, int] = field(default_factory=dict)
    """How often each module went on from a checkpoint, or from the seed."""
    restored: set[int] = field(default_factory=set)
    """Modules that do so in this phase: each member that lacks one has the same."""
    rounds: dict[int, int] = field(default_factory=dict)
    """Committed rounds of each module now; kept by the caller."""
    at: dict[int, int] = field(default_factory=dict)
    """The same at the beginning of this phase."""
    counted: dict[int, set[str]] = field(default_factory=dict)
    """Whose paths are in a module's round of this phase."""
    missed: dict[int, dict[int, str]] = field(default_factory=dict)
    """Paths that do not count in a phase, or not in each of their modules, and who lost them."""
    phases: int = 0
    last: bool = False
    """Nothing is left to train: paths are exported."""
    over: bool = False
    exported: set[int] = field(default_factory=set)
    stopping: bool = False
    checkpoint: int = -1
    """The newest complete one now."""
    source: int = -1
    """The same at the beginning of this phase: what no member holds comes from it for all."""
    history: int = 0
    best: dict[int, float] = field(default_factory=dict)
    """Least held-out loss of each path so far."""
    progress: dict[int, PathProgress] = field(default_factory=dict)
    """What is known of each path, for display."""
    shards: list[PathShard] = field(default_factory=list)
    """Data of each path, for display."""
    save: dict[str, list[int]] = field(default_factory=dict)
    named: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    """The same of each phase that began in this hub process: an upload may end much later."""
    unheard: set[str] = field(default_factory=set)
    """Members that an earlier hub process knew, and that have not reported yet what they hold."""

    @property
    def news(self) -> tuple[object, ...]:
        """Changes whenever an answer that a member waits for may have changed."""
        here = len(self.exported), len(self.waiting), len(self.lost)
        return self.phase, self.history, self.opened, self.over, *here, *self.dealt

    @property
    def assigned(self) -> dict[str, list[int]]:
        """Paths of each member in this phase; of those that were lost since none."""
        return {m: paths for m, paths in self.dealt.items() if m not in self.lost}

    @property
    def awaited(self) -> set[str]:
        """Members with paths that have not trained yet, or have not met yet."""
        return self.assigned.keys() - (self.waiting if self.opened else self.trained)

    # ------------------------------------------------------------------------- record

    def record(self) -> PathRecord:
        """Return what another hub process needs to go on."""
        return PathRecord(
            phase=self.phase, dealt=self.dealt, lost=sorted(self.lost), opened=self.opened,
            rounds=self.at, source=self.source, last=self.last, exported=sorted(self.exported),
            processes={m: self.processes.get(m, "") for m in {*self.dealt, *self.waiting}},
            versions=self.versions, restored=sorted(self.restored), over=self.over,
            history=self.history, best=self.best, missed=self.missed,
            progress=self.progress, shards=self.shards, phases=self.phases,
        )  # fmt: skip

    def recall(self, record: PathRecord) -> None:
        """Go on where an earlier hub process was."""
        self.phase, self.dealt, self.last = record.phase, dict(record.dealt), record.last
        self.lost, self.at, self.source = set(record.lost), dict(record.rounds), record.source
        self.processes, self.missed = dict(record.processes), dict(record.missed)
        self.exported, self.history = set(record.exported), record.history
        self.best, self.opened, self.over = dict(record.best), record.opened, record.over
        self.unheard = set(record.processes)
        self.versions, self.restored = dict(record.versions), set(record.restored)
        self.recall_figures(record)
        if record.opened:
            self.trained = set(self.assigned)
            self._meet()

    def recall_figures(self, record: PathRecord) -> None:
        """Take over what only people see."""
        self.progress, self.shards = dict(record.progress), list(record.shards)
        self.phases = record.phases

    # ------------------------------------------------------------------------ members

    def hold(self, member: str, said: PathAsk | PathTrained) -> None:
        """A member reports which modules it holds, after how many rounds of each."""
        self.unheard.discard(member)
        for module in range(self.settings.layout.num_modules):
            now = self.rounds.get(module), self.versions.get(module, 0)
            current = (said.held.get(module, -1), said.versions.get(module, 0)) == now
            here = self.holds.setdefault(module, set())
            (here.add if current else here.discard)(member)
            self.fetching.setdefault(module, set()).discard(member)

    def committed(self, module: int, members: Collection[str]) -> None:
        """The holders of a module have met: these hold the result."""
        self.holds[module] = set(members)
        self.counted[module] = set(members)

    def gone(self, member: str) -> None:
        """A process has ended, leaves, or was silent for too long: what it trained is lost."""
        self.expected.discard(member)
        self.unheard.discard(member)
        self.waiting.discard(member)
        for there in (*self.holds.values(), *self.fetching.values()):
            there.discard(member)
        self._lose(member)

    def _lose(self, member: str) -> None:
        """Go on without a member in this phase, in what is left of it."""
        if member in self.dealt:
            self.lost.add(member)
        self._end_meeting(member)
        self._open()

    def _end_meeting(self, member: str) -> None:
        self.meets = {module: there - {member} for module, there in self.meets.items()}

    # ------------------------------------------------------------------------- a turn

    def ask(self, member: str, body: PathAsk, now: float) -> PathTurn | None:
        """Return a member's turn; None: not yet."""
        self.phases, self.shards = max(self.phases, body.phases), body.shards or self.shards
        self.expected.discard(member)
        if self.over:
            return PathTurn(phase=self.phase, over=True, stopped=self.stopping)
        same = self.processes.get(member) == body.process
        self.processes[member] = body.process
        if member in self.assigned and member not in self.waiting:
            if not same or (body.lost and body.phase == self.phase):
                self._lose(member)
            elif member in self.trained or body.phase > self.phase:
                self._end_meeting(member)
            else:
                return self.turn(member)  # it has just been dealt, or its first answer was lost
        self.waiting.add(member)
        self._open()
        self.begin(now)
        if self.over:
            return PathTurn(phase=self.phase, over=True, stopped=self.stopping)
        fresh = member in self.assigned and member not in self.waiting
        return self.turn(member) if fresh else None

    def begin(self, now: float) -> bool:
        """Begin the next phase if it is time; return whether it did."""
        first = not self.opened and not self.assigned
        if not self.waiting or not (self.opened or first) or self.awaited or self.unheard:
            return False
        if first and self.expected and now < self.began + self.settings.start_s:
            return False
        layout, here, self.restored = self.settings.layout, set(self.waiting), set()
        if self.last:
            self.over = self.exported >= set(range(layout.num_paths))
        elif self.opened:
            self._count()
            self.phase += 1
        if self.over:
            return True
        self.last = self.last or self.stopping or self.phase >= self.phases
        holds = {m: [n for n, there in self.holds.items() if m in there] for m in here}
        if not any(holds.values()) and not self.last:
            self._go_back()
        left = set(range(layout.num_paths)) - (self.exported if self.last else set())
        before = {member: self.assigned.get(member, []) for member in here}
        dealt = assign(layout, left, here, before=before, holds=holds)
        self.dealt = {member: paths for member, paths in dealt.items() if paths}
        self.waiting -= self.dealt.keys()
        self.trained, self.opened = set(), False
        self.lost, self.meets, self.counted, self.fetching = set(), {}, {}, {}
        self.at, self.source = dict(self.rounds), self.checkpoint
        self.save = self.named[self.phase] = self._savers()
        return True

    def _count(self) -> None:
        """Note which paths do not count in the phase that ends, in all or some of their modules."""
        missed = {
            path: member
            for member, paths in self.dealt.items()
            for path in paths
            if any(
                member not in self.counted.get(module, ())
                for module in self.settings.layout.modules_of(path)
            )
        }
        if missed:
            self.missed[self.phase] = missed

    def _go_back(self) -> None:
        """No member holds any module: all go on from the newest checkpoint."""
        newest = max(0, self.checkpoint)
        if self.phase > newest:
            self.phase, self.history = newest, self.history + 1
            for module in range(self.settings.layout.num_modules):
                self._restore(module)
            self.missed = {p: paths for p, paths in self.missed.items() if p < newest}

    def _restore(self, module: int) -> None:
        """Let a module that no member holds go on from the checkpoint, for all in this phase."""
        self.restored.add(module)
        self.versions[module] = self.versions.get(module, 0) + 1
        self.holds[module] = set()

    def _savers(self) -> dict[str, list[int]]:
        """Return which modules each member saves at the beginning of this phase."""
        every = self.settings.save_every or max(1, self.phases // CHECKPOINTS)
        due = self.last or self.phase % every == 0
        if not due or self.phase <= max(0, self.checkpoint):
            return {}
        found: dict[str, list[int]] = {}
        for module in range(self.settings.layout.num_modules):
            there = [m for m, paths in self.assigned.items() if module in self._modules(paths)]
            if there:
                held = [m for m in there if m in self.holds.get(module, ())]
                found.setdefault((held or there)[0], []).append(module)
        return found

    def saves(self, member: str, phase: int, module: int) -> bool:
        """Return whether a member was to save a module at the beginning of a phase.

        Of phases that began under an earlier hub process it is not known: all may.
        """
        named = self.named.get(phase)
        return phase <= self.phase and (named is None or module in named.get(member, ()))

    def _modules(self, paths: Collection[int]) -> list[int]:
        return self.settings.layout.modules_in(sorted(paths))

    def turn(self, member: str) -> PathTurn | None:
        """Return the present turn of a member; None: it is not known yet who holds its modules."""
        paths = self.assigned[member]
        own = self._modules(paths)
        missing = [module for module in own if member not in self.holds.get(module, ())]
        lacking = {m for m in missing if not self.holds.get(m)} - self.restored
        if any(self.unheard or self.fetching.get(m, set()) - {member} for m in lacking):
            return None
        for module in lacking:
            self._restore(module)
        donors = {m: sorted(self.holds[m]) for m in missing if self.holds.get(m)}
        for module in donors:
            self.fetching.setdefault(module, set()).add(member)
        return PathTurn(
            phase=self.phase, paths=paths, donors=donors, checkpoint=self.source,
            rounds={m: self.at.get(m, 0) for m in own}, last=self.last,
            versions={m: self.versions.get(m, 0) for m in own},
            save=self.save.get(member, []), history=self.history, stopped=self.stopping,
            best={p: self.best[p] for p in paths if p in self.best},
        )  # fmt: skip

    # ---------------------------------------------------------------------- a meeting

    def train(self, member: str, body: PathTrained) -> PathMeeting | None:
        """A member has trained its paths; return whether it meets others, None: not yet."""
        if body.phase != self.phase or member not in self.assigned:
            return PathMeeting(void=True)
        for report in body.reports:
            if report.path not in self.dealt[member]:
                continue
            note(self.progress, member, report, at=(self.history, self.phase), least=self.best)
            if report.held_out is not None:
                known = self.best.get(report.path, report.held_out)
                self.best[report.path] = min(known, report.held_out)
            if report.exported:
                self.exported.add(report.path)
        self.trained.add(member)
        self._open()
        return PathMeeting(meet=True) if self.opened else None

    def _open(self) -> None:
        """Let the holders of modules meet once all members with paths have trained."""
        here = self.assigned
        if self.opened or not here or here.keys() - self.trained - self.waiting:
            return
        self.opened = True
        self._meet()

    def _meet(self) -> None:
        """Say who meets for each module; members that wait for the next phase do not."""
        here = {m: self._modules(p) for m, p in self.assigned.items() if m not in self.waiting}
        modules = range(0 if self.last else self.settings.layout.num_modules)
        self.meets = {n: frozenset(m for m, own in here.items() if n in own) for n in modules}

    def groups_of(self, member: str) -> list[int]:
        """Return the modules in whose rounds a member takes part, ascending."""
        return [module for module, there in sorted(self.meets.items()) if member in there]
