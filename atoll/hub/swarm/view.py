"""What people see of a SWARM: the same for page, terminal, REST, Prometheus and alarms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from atoll.ids import machine_names
from atoll.swarm.ledger import Ledger
from atoll.swarm.places import Member, why_paused
from atoll.swarm.routing import BOTH


class PeerState(StrEnum):
    """What a member does for its stage."""

    READY = "ready"
    RECOVERING = "recovering"
    """It takes over the state of its stage."""
    BANNED = "banned"
    """It failed, and drivers avoid it for some time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """A member that serves a stage."""

    member: str
    name: str
    """For people: its machine, with the member where that has several."""
    node: str
    state: PeerState
    rows_per_s: float | None = None
    """Rows per second there and back, as measured while it computes; None: not measured yet."""
    queue: float = 0.0
    """Microbatches that wait at it."""
    share: float | None = None
    """Of the newest microbatches through its stage; None: there were none."""
    direct: float | None = None
    """Share of the bytes it sent to other members in the last minute that went over connections of
    their own, not through the hub; None: it sent none."""
    accepts: bool = False
    """Others can connect to it."""
    failures: int = 0
    """Times that it failed and was banned, in the last ten minutes."""
    last_failure: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One stage."""

    stage: int
    counted: int
    """Microbatches of the present step that count for it."""
    agreed: bool
    """Its members hold the mean of the step, and wait for other stages."""
    rows_per_s: float | None
    """Of its ready members together; None while a speed is unknown."""
    slowest: bool
    """It limits the throughput of all stages."""
    needs_bytes: int
    """Memory of a member; 0: unknown."""
    peers: Sequence[PeerView]
    failed_in_a_row: int = 0
    """Times that its members failed since a microbatch counted for it last."""

    @property
    def serving(self) -> list[PeerView]:
        """The members that have its state."""
        return [peer for peer in self.peers if peer.state != PeerState.RECOVERING]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoveView:
    """A member that changed its stage."""

    time: float
    """Unix time."""
    member: str
    name: str
    node: str
    source: int
    target: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwarmView:
    """A SWARM at one moment."""

    step: int
    microbatches: int
    """Per step."""
    microbatches_per_s: float
    paused: str
    """Why nothing is computed; empty: it runs."""
    waits_s: float
    """How long it has been paused."""
    empty: Sequence[int]
    """Stages without members."""
    stages: Sequence[StageView]
    coming: Sequence[str]
    """Names of members that have no stage."""
    whole: Sequence[str]
    """Names of members that hold the whole model."""
    moves: Sequence[MoveView]
    """The newest last."""
    measured: int = 0
    """Microbatches of the evaluation of the present state that are measured."""
    to_measure: int = 0
    """Microbatches of that evaluation; 0: this state is not evaluated."""

    def figures(self) -> dict[str, Any]:
        """Return it as values for JSON, rounded: a page gets a copy with every change."""
        rounded = dataclasses.replace(
            self, microbatches_per_s=float(f"{self.microbatches_per_s:.2g}"),
            waits_s=round(self.waits_s),
        )  # fmt: skip
        return dataclasses.asdict(rounded)


SLOWER = 0.8
"""The slowest stage holds the others up if its throughput is at most this share of the next
one's."""


def view_of_swarm(
    ledger: Ledger, now: float, *, nodes: Mapping[str, str], moves: Sequence[MoveView] = (),
    whole: Sequence[str] = (), waits_s: float = 0.0, starts: bool = False,
) -> SwarmView:  # fmt: skip
    """Return the view of a ledger.

    Args:
        ledger: What is shown.
        now: Monotonic seconds.
        nodes: The machines by member.
        moves: The newest changes of places.
        whole: Members that hold the whole model.
        waits_s: How long nothing has been computed.
        starts: The first members build their stages, which is no pause.
    """
    rates = [_rows_per_s(ledger.serving(stage)) for stage in range(ledger.settings.stages)]
    slowest, names = slowest_of(rates), machine_names(nodes)
    return SwarmView(
        step=ledger.step,
        microbatches=ledger.settings.microbatches,
        microbatches_per_s=ledger.recent.per_s(now),
        paused="" if starts else _why_paused(ledger, names),
        waits_s=waits_s,
        empty=ledger.empty(),
        stages=[
            _stage(
                ledger, stage, now, nodes=nodes, names=names, rate=rate, slowest=stage == slowest
            )
            for stage, rate in enumerate(rates)
        ],
        coming=sorted(
            names.get(name, name) for name, member in ledger.members.items() if member.stage < 0
        ),
        whole=[names.get(member, member) for member in whole],
        moves=list(moves),
        measured=len(ledger.evaluations.counted),
        to_measure=len(ledger.evaluations.indices(ledger.step)),
    )


def _why_paused(ledger: Ledger, names: Mapping[str, str]) -> str:
    """Return which stages wait for a machine, and which for a member that recovers their state."""
    coming = {stage: [m for m in ledger.members.values() if m.stage == stage]
              for stage in ledger.empty()}  # fmt: skip
    vacant = [stage for stage, members in coming.items() if not members]
    texts = [why_paused(vacant, ledger.settings.needs_bytes)]
    for stage, members in coming.items():
        who = ", ".join(names.get(m.holder.member, m.holder.member) for m in members)
        texts.append(f"stage {stage} waits for its state, which {who} recovers" if who else "")
    return "; ".join(filter(None, texts))


def slowest_of(rates: Sequence[float | None]) -> int:
    """Return the stage with the least throughput; -1: none stands out, or one is unknown."""
    known = [rate for rate in rates if rate]
    if len(known) < max(2, len(rates)):
        return -1
    first, second = sorted(known)[:2]
    return rates.index(first) if first <= SLOWER * second else -1


def _stage(
    ledger: Ledger, stage: int, now: float, *, nodes: Mapping[str, str],
    names: Mapping[str, str], rate: float | None, slowest: bool,
) -> StageView:  # fmt: skip
    count, settings = ledger.counts[stage], ledger.settings
    shares = ledger.recent.shares(stage)
    members = sorted(
        (member for member in ledger.members.values() if member.stage == stage),
        key=lambda member: (len(member.holder.member), member.holder.member),
    )
    return StageView(
        stage=stage,
        counted=settings.microbatches if count.agreed_by else len(count.counted),
        agreed=bool(count.agreed_by),
        rows_per_s=rate,
        slowest=slowest,
        needs_bytes=settings.needs_bytes[stage] if settings.needs_bytes else 0,
        peers=[
            _peer(ledger, member, now, nodes=nodes, names=names, shares=shares)
            for member in members
        ],
        failed_in_a_row=len(ledger.recent.in_a_row(stage, {m.holder.member for m in members})),
    )


def _peer(
    ledger: Ledger, member: Member, now: float, *, nodes: Mapping[str, str],
    names: Mapping[str, str], shares: Mapping[str, float],
) -> PeerView:  # fmt: skip
    name = member.holder.member
    failures = ledger.recent.failures(name, now)
    direct = ledger.recent.direct(name)
    state = PeerState.READY if member.ready else PeerState.RECOVERING
    if member.ready and any(now < one.banned_until for one in failures):
        state = PeerState.BANNED
    return PeerView(
        member=name,
        name=names.get(name, name),
        node=nodes.get(name, ""),
        state=state,
        rows_per_s=1 / (BOTH * member.row_s) if member.row_s else None,
        queue=member.queue,
        share=shares.get(name, 0.0) if shares else None,
        direct=None if direct is None else round(direct, 3),
        accepts=bool(member.dial),
        failures=len(failures),
        last_failure=failures[-1].reason if failures else "",
    )


def _rows_per_s(serving: Sequence[Member]) -> float | None:
    """Return the rows per second of a stage; members without a measured speed count as usual."""
    known = [1 / (BOTH * member.row_s) for member in serving if member.row_s]
    return len(serving) * sum(known) / len(known) if known else None
