"""Members of a small job with paths on threads: the real ledger, trainer and rounds, no sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.checkpoint import Part
from atoll.checkpoint.format.weights import load_weights
from atoll.config import JobSpec, parse_spec
from atoll.errors import PeerLost
from atoll.group.in_process.groups import MemoryGroups
from atoll.paths.assign import assign
from atoll.paths.layout import PathLayout, weights_name
from atoll.paths.ledger import PathLedger, PathSettings
from atoll.recovery import StateOf
from atoll.recovery.snapshot_cache import Still
from atoll.train.paths.trainer import PathMember, PathTrainer
from atoll.train.results.outputs import Outputs
from atoll.wire.paths import PathAsk, PathMeeting, PathTrained, PathTurn
from tests.patience import PATIENCE_S

T = TypeVar("T")

JOB = """
[job]
nodes = {nodes}
[model]
name = "gpt"
layers = 2
width = 16
heads = 2
context = 16
tie = false
dropout = 0.0
[data]
corpus = "files:{text}"
[train]
steps = {steps}
batch = 4
lr = 1e-2
warmup = 2
[strategy]
preset = "dipaco"
codec = "fp32"
every = 3
[dipaco]
modules = {modules}
held_out = {held_out}
{more}
"""


def job_of(
    folder: Path, modules: Sequence[int], *, nodes: int, steps: int = 6, held_out: float = 0.0,
    more: str = "",
) -> JobSpec:  # fmt: skip
    text = folder / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}. " for n in range(1500)))
    values = {"nodes": nodes, "steps": steps, "held_out": held_out, "more": more}
    return parse_spec(JOB.format(text=text, modules=list(modules), **values))


def without_paths(spec: JobSpec, *, nodes: int) -> JobSpec:
    """Return the same job with DiLoCo: every member trains the whole model."""
    strategy = replace(spec.strategy, preset="diloco", inner="", outer="diloco")
    strategy = replace(strategy, options={"every": 3, "shared_steps": 0, "outer_lr": 0.7,
                                          "outer_momentum": 0.9})  # fmt: skip
    dipaco = replace(spec.dipaco, modules=[], copies=1)
    return replace(spec, strategy=strategy, dipaco=dipaco, job=replace(spec.job, nodes=nodes))


@dataclass
class HubInProcess:
    """The hub's part, in this process."""

    layout: PathLayout
    members: Sequence[str]
    book: PathLedger = field(init=False)
    changed: threading.Condition = field(default_factory=threading.Condition)
    groups: dict[int, MemoryGroups] = field(default_factory=dict)
    after: list[dict[str, dict[int, str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = PathSettings(layout=self.layout, save_every=1000)
        self.book = PathLedger(settings, 0, set(self.members), 0.0)
        paths = range(self.layout.num_paths)
        dealt = assign(self.layout, paths, self.members, before={}, holds={})
        for module in range(self.layout.num_modules):
            there = [m for m in self.members if module in self.layout.modules_in(dealt[m])]
            self.groups[module] = MemoryGroups(len(there), ids=there)

    def group_of(self, member: str) -> Callable[[int], Any]:
        def find(module: int) -> Any:
            groups = self.groups[module]
            return next((one for one in groups if one.me == member), groups[0])

        return find

    def wait(self, look: Callable[[], T | None]) -> T:
        with self.changed:
            while (found := look()) is None:
                assert self.changed.wait(PATIENCE_S)
            self.changed.notify_all()
            return found

    def rounds(self) -> dict[int, int]:
        return {m: g.coordinator.machine.committed_round for m, g in self.groups.items()}


@dataclass
class TurnsInProcess:
    hub: HubInProcess
    member: str
    trainer: PathTrainer | None = None

    def ask(self, body: PathAsk) -> PathTurn:
        book = self.hub.book
        with self.hub.changed:
            book.rounds = self.hub.rounds()
            book.hold(self.member, body)

        def look() -> PathTurn | None:
            book.rounds = self.hub.rounds()
            turn = book.ask(self.member, body, 0.0)
            self.hub.changed.notify_all()
            return turn

        return self.hub.wait(look)

    def trained(self, body: PathTrained) -> PathMeeting:
        def look() -> PathMeeting | None:
            found = self.hub.book.train(self.member, body)
            self.hub.changed.notify_all()
            return found

        return self.hub.wait(look)


class NoStates:
    """Nothing is given or saved: all modules begin with the weights of the seed."""

    def donated(
        self, number: int, donors: Sequence[str], *, serves: Mapping[str, Sequence[str]]
    ) -> Mapping[str, Tensor]:
        raise PeerLost("no member gives modules here", given=", ".join(donors))

    def saved(self, round_: int, module: int) -> Mapping[str, Tensor]:
        raise AssertionError("there is no checkpoint")

    def offer_several(self, find: Callable[[int], StateOf], *, still: Still, images: int) -> None:
        """No member asks."""

    def save(self, parts: Sequence[Part], *, round_: int, final: bool) -> bool:
        return True


@dataclass(frozen=True)
class Run:
    results: dict[str, dict[str, Any]]
    weights: dict[int, dict[str, Tensor]]
    """Exported weights of each path."""
    hub: HubInProcess

    def digests(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for result in self.results.values():
            for module, digest in result["modules"].items():
                found.setdefault(int(module), set()).add(digest)
        return found


def run_paths(spec: JobSpec, folder: Path, *, members: int) -> Run:
    """Train all paths with so many members on threads."""
    layout = PathLayout.of(spec.dipaco.modules, copies=spec.dipaco.copies)
    names = [f"w{n}" for n in range(members)]
    hub = HubInProcess(layout, names)
    files: dict[str, Path] = {}
    results: dict[str, dict[str, Any]] = {}
    errors: list[BaseException] = []

    def one(name: str) -> None:
        outputs = Outputs(folder / name, publish=lambda path, file: files.update({file: path}))
        (folder / name).mkdir(parents=True, exist_ok=True)
        try:
            member = PathMember(
                name, hub.group_of(name), TurnsInProcess(hub, name), NoStates(), outputs
            )
            with building:  # torch's random numbers are those of the process
                trainer = PathTrainer(spec, member)
            built.wait(PATIENCE_S)
            results[name] = trainer.train()
        except BaseException as error:
            errors.append(error)
            with hub.changed:
                hub.book.gone(name)
                hub.changed.notify_all()

    building, built = threading.Lock(), threading.Barrier(members)
    threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]
    weights = {
        path: dict(load_weights(files[weights_name(path)]).state)
        for path in range(layout.num_paths)
    }
    return Run(results, weights, hub)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
