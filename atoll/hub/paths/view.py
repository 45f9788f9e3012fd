"""What people see of a job with paths: the same for page, terminal and report."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

from atoll.hub.observability.latest import Latest
from atoll.ids import machine_names
from atoll.paths.layout import PathLayout
from atoll.paths.ledger import PathRecord
from atoll.paths.progress import PathProgress


class PathState(StrEnum):
    """How far a path is in the present phase."""

    TRAINING = "training"
    WAITING = "waiting"
    """Its member trains another one of its paths first."""
    TRAINED = "trained"
    """Its modules meet as soon as all other paths are trained."""
    LOST = "lost"
    """Its member was lost: it gets another one in the next phase."""
    DONE = "done"
    """Its weights are at the hub, as of the end of the run."""
    STOPPED = "stopped"
    """The job has ended before it did."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleView:
    """A module and who holds it."""

    module: int
    """Number within its level."""
    paths: Sequence[int]
    holders: Sequence[str]
    """Their machines, with the member where one has several; empty: none, it is in the checkpoint
    or starts from the seed."""
    round: int | None
    """Rounds of its holders; None: the job has ended."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PathView:
    """A path."""

    path: int
    modules: Sequence[int]
    """Of each level."""
    state: PathState
    member: str
    """Who trains it, or did last."""
    name: str
    """The same for people: its machine, with the member where that has several."""
    node: str
    step: int
    tokens: int
    loss: float | None
    """Training loss."""
    held_out: float | None
    """Newest loss on its own held-out documents."""
    best: float | None
    """The least of these."""
    best_step: int | None
    """Step at which it was least: the path ends as it was then."""
    stopped_early: bool
    """The run is over, and the path ends as it was before."""
    documents: int | None
    """In its shard; None: blocks of the corpus are dealt evenly."""
    shard_tokens: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PathsView:
    """All of them at one moment."""

    phase: int
    phases: int
    modules: Sequence[int]
    """Number of modules of each level."""
    copies: int
    levels: Sequence[Sequence[ModuleView]]
    paths: Sequence[PathView]
    empty: Sequence[int]
    """Paths without a document."""

    def figures(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What the ledger does not know."""

    ended: bool
    nodes: Mapping[str, str]
    """The machines by member."""
    holds: Mapping[int, Collection[str]]
    rounds: Mapping[int, int]
    latest: Mapping[str, Latest]


def view_of_paths(layout: PathLayout, record: PathRecord, around: Around) -> PathsView:
    """Return the view of a ledger's record."""
    names = machine_names(around.nodes)
    paths = [_path(path, layout, record, around, names) for path in range(layout.num_paths)]
    levels: list[list[ModuleView]] = [[] for _ in layout.modules]
    for module in range(layout.num_modules):
        level = levels[layout.level_of(module)]
        level.append(_module(module, len(level), layout, around, names))
    return PathsView(
        phase=record.phase, phases=record.phases, modules=layout.modules, copies=layout.copies,
        levels=levels, paths=paths, empty=[one.path for one in paths if one.documents == 0],
    )  # fmt: skip


def _module(
    module: int, number: int, layout: PathLayout, around: Around, names: Mapping[str, str]
) -> ModuleView:
    holders = sorted(around.holds.get(module, ()), key=lambda name: (len(name), name))
    return ModuleView(
        module=number,
        paths=layout.paths_through(module),
        holders=[names.get(holder, holder) for holder in holders],
        round=None if around.ended else around.rounds.get(module, 0),
    )


def _path(
    path: int, layout: PathLayout, record: PathRecord, around: Around, names: Mapping[str, str]
) -> PathView:
    known = record.progress.get(path, PathProgress())
    owner = next((name for name, own in record.assigned.items() if path in own), "")
    member = owner or known.member
    live = around.latest.get(owner, Latest())
    state = _state(path, record, around, owner)
    now = state == PathState.TRAINING and live.values.get("path") == path
    first = 0
    modules = []
    for module, count in zip(layout.modules_of(path), layout.modules, strict=True):
        modules.append(module - first)
        first += count
    shard = record.shards[path] if path < len(record.shards) else None
    return PathView(
        path=path,
        modules=modules,
        state=state,
        member=member,
        name=names.get(member, member),
        node=around.nodes.get(member, ""),
        step=max(known.step, live.step) if now else known.step,
        tokens=known.tokens,
        loss=live.values.get("loss", known.loss) if now else known.loss,
        held_out=known.held_out,
        best=record.best.get(path),
        best_step=known.best_step,
        stopped_early=(
            state == PathState.DONE and known.best_step is not None and known.best_step < known.step
        ),
        documents=None if shard is None else shard.documents,
        shard_tokens=None if shard is None else shard.tokens,
    )


def _state(path: int, record: PathRecord, around: Around, owner: str) -> PathState:
    known = record.progress.get(path, PathProgress())
    reported = known.phase == record.phase and (around.ended or known.history == record.history)
    if reported and record.phase >= record.phases:
        return PathState.DONE
    if around.ended:
        return PathState.STOPPED
    if reported:
        return PathState.TRAINED
    if not owner:
        return PathState.LOST if record.assigned else PathState.WAITING
    alone = len(record.assigned[owner]) == 1
    turn = around.latest.get(owner, Latest()).values.get("path") == path
    return PathState.TRAINING if alone or turn else PathState.WAITING
