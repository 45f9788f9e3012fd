"""Checks that method, codec and group fit together, before any machine is used. No torch.

Every rule sees names and numbers only, and its error says what does not fit, why, and the nearest
valid choice. Rules of a single method are in its row (`Method.check`); ranges are checked where
options are built; `aggregate`, `collective` and `admission` by :class:`Aggregation`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from atoll.config import JobSpec
from atoll.errors import ConfigError, PeerLost
from atoll.group.aggregation import ADD_ON_THE_WAY, Aggregation
from atoll.methods.codecs import CODECS, CodecRow
from atoll.methods.method import CodecSupport, Method
from atoll.methods.table import METHODS
from atoll.strategies.inner.options import check_island
from atoll.strategies.resolve import Resolved, resolve
from atoll.strategies.verifiable import check_verified


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is about to be started."""

    method: Method
    codec: str
    nodes: int
    min_nodes: int
    route: str
    aggregation: Aggregation
    optimizer: str
    inner: str = "local"

    @property
    def codecs(self) -> frozenset[str]:
        """Names in the codec's spec, wrappers and parts alike."""
        return frozenset(re.findall(r"[a-z][a-z0-9_]*", self.codec))

    @property
    def gathering(self) -> list[str]:
        """Codecs in the spec whose packets cannot hold a mean."""
        return sorted(name for name in self.codecs & CODECS.keys() if CODECS[name].needs_allgather)

    @property
    def outer(self) -> str:
        """Name of the outer strategy."""
        return self.method.name

    @property
    def fewest(self) -> int:
        """Smallest number of members with which rounds must work."""
        return self.min_nodes or self.nodes


def check(
    resolved: Resolved,
    *,
    nodes: int,
    min_nodes: int = 0,
    route: str = "auto",
    aggregation: Aggregation | None = None,
    optimizer: str = "",
) -> None:
    """Raise if a strategy, a codec and a group cannot work together.

    Args:
        resolved: The strategy.
        nodes: Number of members that train together.
        min_nodes: Fewest with which training continues; 0: all are needed to start.
        route: `auto`, `direct` or `relay`.
        aggregation: How the group combines values; None: the aggregation of `resolved`.
        optimizer: The inner one, as in `[train]`; empty if unknown.

    Raises:
        ConfigError: they do not fit; the message names the reason and the nearest valid choice.
    """
    plan = Plan(
        method=resolved.method, codec=resolved.codec, nodes=nodes, min_nodes=min_nodes,
        route=route, aggregation=aggregation or resolved.aggregation, optimizer=optimizer,
        inner=resolved.inner,
    )  # fmt: skip
    for rule in RULES:
        rule(plan)
    resolved.method.check(nodes=nodes, min_nodes=plan.fewest, optimizer=optimizer)


def check_job(spec: JobSpec) -> Resolved:
    """Return a job's strategy after checking it.

    The command line, the memory plan and the workers all call this, so their defaults agree.

    Raises:
        ConfigError: its parts do not fit, or a name or an option is unknown.
    """
    resolved = resolve(spec.strategy, steps=spec.train.steps)
    check(
        resolved, nodes=spec.job.nodes, min_nodes=spec.job.min_nodes, route=spec.job.route,
        optimizer=spec.train.optimizer,
    )  # fmt: skip
    check_island(spec)
    check_verified(spec, resolved)
    return resolved


# ------------------------------------------------------------------------ codecs and collectives


def check_sparse(plan: Plan) -> None:
    """Require an all-gather for sparse codecs: a sum of sparse vectors is not sparse."""
    sparse = plan.gathering
    collective = plan.aggregation.collective
    if sparse and collective in ADD_ON_THE_WAY:
        raise ConfigError(
            f"collective {collective} sums packets, which codec {sparse[0]} does not allow",
            given=f"codec = {plan.codec!r}, collective = {collective!r}",
            expected="a codec with packets that can be summed, or a collective that gathers",
            remedy='collective = "auto"',
        )


def check_codec(plan: Plan) -> None:
    """Check that the codec can encode what the method sends."""
    support = plan.method.codecs
    if support is None:
        return
    refused = {row.name for row in CODECS.values() if not fits(support, row)}
    if plan.codecs & refused:
        usable = sorted(CODECS.keys() - refused)
        raise ConfigError(
            f"{plan.outer} cannot use this codec: {support.why}",
            given=f"codec = {plan.codec!r}",
            expected=f"one of {', '.join(usable)}" if support.precise_only
            else f"a codec without {', '.join(sorted(refused))}",
            remedy=f"codec = {support.nearest!r}",
        )  # fmt: skip


def fits(support: CodecSupport, row: CodecRow) -> bool:
    """Return whether a method can use a codec."""
    return not (
        (support.one_mean and row.needs_allgather)
        or (row.remembers and not support.memory)
        or (support.precise_only and not row.precise)
        or row.name in support.refused
    )


def check_collective(plan: Plan) -> None:
    """Check that members can connect directly, as collectives require."""
    if plan.aggregation.collective != "auto" and plan.route == "relay":
        raise ConfigError(
            "collectives need the direct route; on the relay route the reducer sums",
            given=f'collective = {plan.aggregation.collective!r} with route = "relay"',
            expected='route = "auto" or "direct"',
            remedy='leave collective out, or set route = "auto" in [job]',
        )


# ------------------------------------------------------------------------------- aggregations


def check_rounding(plan: Plan) -> None:
    """Refuse lossy codecs where partial sums travel: every hop would round again."""
    if plan.codec != "fp32":
        plan.aggregation.check_codec(plan.codec)


def check_whole_vectors(plan: Plan) -> None:
    """Refuse robust rules on sparse values: at each position most members would have zeros."""
    sparse = plan.gathering
    if sparse and plan.aggregation.robust:
        raise ConfigError(
            f"codec {sparse[0]} selects different values per member, so no robust rule applies",
            given=f"codec = {plan.codec!r}, aggregate = {plan.aggregation.aggregate!r}, "
            f"admission = {plan.aggregation.admission!r}",
            expected="a codec that sends every coordinate, or the same ones on every member",
            remedy='codec = "feedback(int8)" or "feedback(randomk:0.01)"',
        )


def check_reducer(plan: Plan) -> None:
    """Require one reducer for rules that look at whole vectors or keep state."""
    if plan.aggregation.needs_reducer and plan.route == "direct":
        raise ConfigError(
            "this rule needs the reducer, which sees all contributions",
            given=f"aggregate = {plan.aggregation.aggregate!r}, admission = "
            f'{plan.aggregation.admission!r} with route = "direct"',
            expected='route = "relay" or "auto"',
            remedy='set route = "relay" in [job]; aggregate "median" and "trimmed:F" work directly',
        )


def check_members(plan: Plan) -> None:
    """Check that a rule against F wrong members has enough members."""
    sizes = {"nodes": plan.nodes, "min_nodes": plan.min_nodes or plan.nodes}
    for name, members in sizes.items():
        try:
            plan.aggregation.check_members(members)
        except PeerLost as error:
            remedy, _, _ = (error.remedy or "").partition(";")
            raise ConfigError(
                f"too few members for the aggregate {plan.aggregation.aggregate}",
                given=f"{name} = {members}", expected=error.expected, remedy=remedy,
            ) from error  # fmt: skip


def check_aggregate(plan: Plan) -> None:
    """Refuse an aggregate rule for methods that never combine all members' values."""
    aggregation = plan.aggregation
    without = not plan.method.has_mean
    if without and (aggregation.aggregate != "mean" or aggregation.admission != "finite"):
        raise ConfigError(
            f"{plan.outer} computes no mean of all members, so no rule applies",
            given=f"aggregate = {aggregation.aggregate!r}, admission = {aggregation.admission!r}",
            expected='aggregate = "mean" and admission = "finite"',
            remedy='a method with common rounds, e.g. preset = "diloco"',
        )
    if without and aggregation.collective != "auto":
        raise ConfigError(
            f"{plan.outer} computes no mean of all members, so no collective applies",
            given=f"collective = {aggregation.collective!r}", expected='collective = "auto"',
            remedy='for per-step training over collectives: preset = "ddp"',
        )  # fmt: skip


def check_sums(plan: Plan) -> None:
    """Refuse sums of parameter changes: the step would be too long and buffers would be summed."""
    if plan.aggregation.aggregate == "sum":
        raise ConfigError(
            "summing updates multiplies the step by the number of members",
            given=f'aggregate = "sum" with outer = {plan.outer!r}',
            expected='aggregate = "mean"',
            remedy='only gradients may be summed: preset = "ddp" with reduction = "sum"',
        )


# --------------------------------------------------------------------------------- options


def check_nesterov(plan: Plan) -> None:
    """Refuse Nesterov without momentum."""
    name = getattr(plan.method, "outer_optimizer", "")
    momentum = getattr(plan.method, "outer_momentum", None)
    if name in ("nesterov", "momentum") and momentum == 0:
        raise ConfigError(
            f"{name} without momentum is plain SGD",
            given=f"outer_optimizer = {name!r}, outer_momentum = 0",
            expected="outer_momentum above 0",
            remedy='outer_optimizer = "sgd", or outer_momentum = 0.9',
        )


def check_island_gradients(plan: Plan) -> None:
    """Refuse gradient methods for islands: their ranks step by themselves and share parameters."""
    if plan.inner in ("local", *IN_PARTS) or not plan.method.uses_gradients:
        return
    optimizer = getattr(plan.method, "optimizer", "")  # of parameter servers
    raise ConfigError(
        f"{plan.outer} combines gradients, which an island does not expose",
        given=f"outer = {plan.outer!r}"
        + (f", optimizer = {optimizer!r}" if optimizer else "")
        + f" with inner = {plan.inner!r}",
        expected="a method that combines parameters, e.g. average, diloco or streaming",
        remedy='optimizer = "member" in [strategy]' if optimizer
        else 'outer = "average" with every = 1 in [strategy], or preset = "diloco"',
    )  # fmt: skip


IN_PARTS = ("swarm", "paths")
"""Inner strategies that cut the model into parts; the members of each part run their own rounds."""


def check_parts(plan: Plan) -> None:
    """Require a method that the holders of each stage or module can use among themselves."""
    if plan.inner not in IN_PARTS:
        return
    part = "stage" if plan.inner == "swarm" else "module"
    shared = sorted(plan.codecs & {"lowrank", "auto"})
    if shared:
        raise ConfigError(
            f"codec {shared[0]} keeps a state that a member new to a {part} would need",
            given=f"codec = {plan.codec!r} with inner = {plan.inner!r}",
            expected="a codec without a common state",
            remedy='codec = "int8" or "feedback(int8)" in [strategy]',
        )
    if plan.method.per_stage:
        return
    fitting = sorted(name for name, method in METHODS.items() if method.per_stage)
    preset = "dipaco" if part == "module" else "swarm"
    raise ConfigError(
        f"{plan.outer} cannot work per {part}, and each {part} has rounds of its own",
        given=f"outer = {plan.outer!r} with inner = {plan.inner!r}",
        expected=f"one of {', '.join(fitting)}",
        remedy=f'preset = "{preset}" or "diloco" in [strategy]',
    )


def check_servers(plan: Plan) -> None:
    """Require the relay for parameter servers: members reach them through the hub only."""
    if plan.method.needs_servers and plan.route == "direct" and plan.nodes > 1:
        raise ConfigError(
            "parameter servers are reached over the relay only",
            given='route = "direct"', expected='route = "auto" or "relay"',
            remedy='route = "auto": common rounds still go directly where members reach each other',
        )  # fmt: skip


RULES: tuple[Callable[[Plan], None], ...] = (
    check_sparse,
    check_codec,
    check_rounding,
    check_collective,
    check_whole_vectors,
    check_reducer,
    check_members,
    check_aggregate,
    check_sums,
    check_nesterov,
    check_island_gradients,
    check_parts,
    check_servers,
)
"""All rules; each raises or returns nothing."""
