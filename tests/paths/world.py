"""Members, rounds and disks around the real ledger, one step of one of them at a time.

What a module is made of is written down as it happens: the phases whose rounds are in it, and the
paths in each of them. So what is counted twice, or lost without a word, is seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from atoll.paths.layout import PathLayout
from atoll.paths.ledger import PathLedger, PathRecord, PathSettings
from atoll.wire.paths import PathAsk, PathReport, PathTrained, PathTurn

Content = tuple[tuple[int, frozenset[int]], ...]
"""A module: (phase, paths that count) of each round that is in it."""


@dataclass
class Process:
    """A member's process, as `train/paths/trainer.py` acts."""

    name: str
    number: int
    held: dict[int, tuple[int, int, Content]] = field(default_factory=dict)
    """Rounds, version and content of each module."""
    phase: int = -1
    lost: bool = False
    failed: int = 0
    history: int = 0
    turn: PathTurn | None = None
    meeting: list[int] | None = None
    """Modules whose rounds are still to come."""
    over: bool = False
    asleep: bool = False


class World:
    """See the module's docstring."""

    def __init__(
        self, rng: random.Random, layout: PathLayout, *, members: int, phases: int
    ) -> None:
        self.rng, self.layout, self.phases = rng, layout, phases
        self.processes: dict[str, Process] = {}
        self.dead: dict[str, int] = {}
        """Processes whose end the hub does not know yet."""
        self.rounds = dict.fromkeys(range(layout.num_modules), 0)
        self.joined: dict[int, set[str]] = {m: set() for m in range(layout.num_modules)}
        self.log: dict[tuple[int, int], frozenset[int]] = {}
        """Paths that count in each module and phase, without what was trained again since."""
        self.history = 0
        self.verdicts: dict[tuple[int, int], set[str]] = {}
        """Contributors by module and round."""
        self.checkpoints: dict[int, dict[int, Content]] = {}
        self.saving: dict[tuple[int, int], dict[int, Content]] = {}
        self.names = [f"w{n}" for n in range(members)]
        self.launched = 0
        self.settings = PathSettings(layout=layout, save_every=2)
        self.book = PathLedger(self.settings, 0, set(self.names), 0.0)
        self.disk: PathRecord | None = None
        for name in self.names:
            self.launch(name)

    @property
    def over(self) -> bool:
        return self.book.over and not self.dead and all(p.over for p in self.processes.values())

    # ------------------------------------------------------------------------- what happens

    def launch(self, name: str) -> None:
        self.launched += 1
        self.processes[name] = Process(name, self.launched)

    def kill(self, name: str) -> None:
        """End a process and start another; the hub may hear of it later."""
        self.processes.pop(name)
        for there in self.joined.values():
            there.discard(name)
        self.dead[name] = self.launched
        self.launch(name)

    def notice(self, name: str) -> None:
        self.dead.pop(name, None)
        self.book.gone(name)

    def restart_hub(self) -> None:
        """Another hub process takes over what is on disk; verdicts are, too."""
        book = PathLedger(self.settings, 0, set(self.names), 0.0)
        if self.disk is not None:
            book.recall(self.disk)
            for module, round_ in self.disk.rounds.items():
                if (module, round_) in self.verdicts:
                    book.counted[module] = set(self.verdicts[module, round_])
            for name in sorted(self.dead):
                book.gone(name)
        self.dead.clear()
        self.book = book

    def act(self, name: str) -> None:
        """Do a process's next step."""
        process = self.processes[name]
        if process.over or process.asleep:
            return
        if self.dead.pop(name, None) is not None and self.rng.random() < 0.5:
            self.book.gone(name)  # at last; otherwise the ledger sees that the process is another
        if process.meeting:
            self._join(process)
        elif process.turn is not None:
            self._train(process)
        else:
            self._ask(process)

    def commit(self, module: int, *, short: bool = False) -> None:
        """Commit a module's round once all that meet have joined; `short`: without the others."""
        meets = self.book.meets.get(module, frozenset())
        for name in sorted(self.joined[module] - meets):
            self._refuse(name, module)
        joined = self.joined[module]
        if not joined or (meets - joined and not short):
            return
        for name in sorted(meets - joined):  # they were silent for too long
            self.book.gone(name)
        round_ = self.rounds[module]
        contents = {self.processes[name].held[module] for name in joined}
        assert len(contents) == 1, "replicas of a module differ"
        held, version, content = contents.pop()
        assert held == round_
        paths = frozenset(
            path
            for name in joined
            for path in self._turn(name).paths
            if module in self.layout.modules_of(path)
        )
        phase = self.book.phase
        assert {self._turn(name).phase for name in joined} == {phase}
        assert len(paths) == sum(
            module in self.layout.modules_of(path)
            for name in joined
            for path in self._turn(name).paths
        ), "two members bring the same path"
        assert not content or content[-1][0] < phase, "a phase counts twice in a module"
        self.verdicts[module, round_] = set(joined)
        self.log[module, phase] = paths
        self.rounds[module] = round_ + 1
        self.book.committed(module, joined)
        for name in sorted(joined):
            process = self.processes[name]
            process.held[module] = round_ + 1, version, (*content, (phase, paths))
            self._met(process, module)
        self.joined[module] = set()

    # -------------------------------------------------------------------------- a process

    def _ask(self, process: Process) -> None:
        book = self.book
        book.rounds, book.checkpoint = dict(self.rounds), max(self.checkpoints, default=-1)
        body = PathAsk(
            process.phase, process.lost, self.phases, self._held(process),
            self._versions(process), str(process.number),
        )  # fmt: skip
        book.hold(process.name, body)
        turn = book.ask(process.name, body, 1e9)
        if book.history != self.history:
            self.history = book.history
            self.log = {key: paths for key, paths in self.log.items() if key[1] < book.phase}
        self.disk = self._copy(book.record())
        if turn is None or self.rng.random() < 0.1:  # the answer may be lost
            return
        process.over = turn.over
        if not turn.over and self._take(process, turn):
            process.turn, process.lost, process.failed = turn, False, 0
            if turn.save:
                self._save(process, turn)

    def _take(self, process: Process, turn: PathTurn) -> bool:
        if turn.history != process.history:
            process.held, process.history = {}, turn.history
        process.phase = turn.phase
        process.held = {m: h for m, h in process.held.items() if m not in turn.donors}
        for module in self.layout.modules_in(turn.paths):
            round_ = turn.rounds[module]
            assert round_ == self.rounds[module], "modules change during a phase"
            if process.held.get(module, (-1, -1))[:2] == (round_, turn.versions[module]):
                continue
            content: Content = ()
            if module in turn.donors:
                given = [
                    self.processes[name].held[module][2]
                    for name in turn.donors[module]
                    if self.processes[name].held.get(module, (-1,))[0] == round_
                ]
                if not given:
                    process.failed += 1
                    process.lost = process.failed % 3 == 0
                    return False
                content = given[0]
            elif turn.checkpoint >= 0:
                content = self.checkpoints[turn.checkpoint][module]
            process.held[module] = round_, turn.versions[module], content
        return True

    def _save(self, process: Process, turn: PathTurn) -> None:
        saved = self.saving.setdefault((turn.history, turn.phase), {})
        saved |= {module: process.held[module][2] for module in turn.save}
        if len(saved) == self.layout.num_modules:
            self.checkpoints = {p: c for p, c in self.checkpoints.items() if p < turn.phase}
            self.checkpoints[turn.phase] = saved

    def _train(self, process: Process) -> None:
        turn, book = self._turn(process.name), self.book
        reports = [PathReport(path, exported=turn.last) for path in turn.paths]
        book.rounds = dict(self.rounds)
        body = PathTrained(turn.phase, reports, self._held(process), self._versions(process))
        book.hold(process.name, body)
        found = book.train(process.name, body)
        self.disk = self._copy(book.record())
        if found is None or self.rng.random() < 0.1:
            return
        if found.void:
            process.turn, process.lost = None, True
            return
        own = self.layout.modules_in(turn.paths)
        process.held = {m: h for m, h in process.held.items() if m in own}
        if turn.last:
            process.turn = None
        else:
            process.meeting = list(own)

    def _join(self, process: Process) -> None:
        assert process.meeting
        module = process.meeting[0]
        if process.held[module][0] == self.rounds[module]:
            self.joined[module].add(process.name)
        else:
            self._refuse(process.name, module)
        self.commit(module)

    def _refuse(self, name: str, module: int) -> None:
        self.joined[module].discard(name)
        process = self.processes[name]
        del process.held[module]
        self._met(process, module)

    def _met(self, process: Process, module: int) -> None:
        assert process.meeting is not None
        process.meeting.remove(module)
        if not process.meeting:
            process.phase = self._turn(process.name).phase + 1
            process.turn = process.meeting = None

    @staticmethod
    def _held(process: Process) -> dict[int, int]:
        return {module: held[0] for module, held in process.held.items()}

    @staticmethod
    def _versions(process: Process) -> dict[int, int]:
        return {module: held[1] for module, held in process.held.items()}

    def _turn(self, name: str) -> PathTurn:
        turn = self.processes[name].turn
        assert turn is not None
        return turn

    @staticmethod
    def _copy(record: PathRecord) -> PathRecord:
        return msgspec.json.decode(msgspec.json.encode(record), type=PathRecord)

    # -------------------------------------------------------------------------- what holds

    def check_end(self) -> None:
        """Every path of every phase counts, or is noted as missed."""
        book = self.book
        assert book.exported == set(range(self.layout.num_paths))
        for phase in range(book.phase):
            missed = book.missed.get(phase, {})
            for path in range(self.layout.num_paths):
                counts = [
                    path in self.log.get((module, phase), frozenset())
                    for module in self.layout.modules_of(path)
                ]
                assert all(counts) == (path not in missed), (phase, path, counts, missed)
