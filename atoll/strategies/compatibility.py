"""Refuses what cannot work together, before a machine is asked for it. No torch.

Every rule looks at names and numbers only and says three things: what does not fit, why, and the
nearest thing that works. Numbers that are out of range by themselves are refused where options are
built; what `aggregate`, `collective` and `admission` may say together, by :class:`GroupPolicy`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from atoll.errors import ConfigError, PeerLost
from atoll.group.policy import ADD_ON_THE_WAY, GroupPolicy
from atoll.strategies.codec_support import GATHERING, PAIRED, SERVED, TASTES
from atoll.strategies.options import defaults_of
from atoll.strategies.registry import OUTERS, Resolved

SWAPPED = frozenset({"alone", "demo", "cocktail", "onebit_adam"})
"""Outer strategies whose members swap packets of their own, or nothing at all."""

ON_GRADIENTS = frozenset({"every_step", "powersgd", "demo", "sign_majority", "onebit_adam"})
"""Outer strategies that combine or use gradients of single steps."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is about to be started, as names and numbers."""

    outer: str
    codec: str
    options: Mapping[str, Any]
    """All options of the outer strategy, defaults included."""
    nodes: int
    min_nodes: int
    route: str
    policy: GroupPolicy
    optimizer: str
    inner: str = "local"

    @property
    def codecs(self) -> frozenset[str]:
        """Names in the codec's spec, wrappers and parts alike."""
        return frozenset(re.findall(r"[a-z][a-z0-9_]*", self.codec))

    @property
    def fewest(self) -> int:
        """Members with whom rounds must be possible."""
        return self.min_nodes or self.nodes


def check(
    resolved: Resolved,
    *,
    nodes: int,
    min_nodes: int = 0,
    route: str = "auto",
    policy: GroupPolicy | None = None,
    optimizer: str = "",
) -> None:
    """Refuse a strategy, a codec and a group that cannot work together.

    Args:
        resolved: The strategy.
        nodes: Members that are to train together.
        min_nodes: Fewest with whom it is to go on; 0: all are needed to start.
        route: `auto`, `direct` or `relay`.
        policy: What the group does with the members' values; None: what `resolved` says.
        optimizer: The inner one, as in `[train]`; empty where nobody knows.

    Raises:
        ConfigError: they cannot; the message has the reason and the nearest thing that works.
    """
    defaults = defaults_of(resolved.outer) if resolved.outer in OUTERS else {}
    plan = Plan(
        outer=resolved.outer, codec=resolved.codec, options={**defaults, **resolved.options},
        nodes=nodes, min_nodes=min_nodes, route=route, policy=policy or resolved.policy,
        optimizer=optimizer, inner=resolved.inner,
    )  # fmt: skip
    for rule in RULES:
        rule(plan)


def named(options: object, codec: str) -> Resolved:
    """Return what options of an outer strategy and a codec are called in a job file.

    Options of a strategy that is not in the table keep their own values and go by no name.
    """
    kind = f"{type(options).__module__}:{type(options).__name__}"
    outer = next((name for name, path in OUTERS.items() if path == kind), "")
    values = dataclasses.asdict(cast(Any, options))
    return Resolved(inner="local", outer=outer, codec=codec, options=values)


# ------------------------------------------------------------------------ codecs and collectives


def check_sparse(plan: Plan) -> None:
    """A sum of sparse vectors is not sparse, so it cannot travel as one of them."""
    sparse = sorted(plan.codecs & GATHERING)
    collective = plan.policy.collective
    if sparse and collective in ADD_ON_THE_WAY:
        raise ConfigError(
            f"codec {sparse[0]} does not add up on the way, which collective {collective} has to",
            given=f"codec = {plan.codec!r}, collective = {collective!r}",
            expected="a codec whose packets add up, or a collective that gathers",
            remedy='collective = "auto"',
        )


def check_codec(plan: Plan) -> None:
    """Some methods send what only some codecs can carry."""
    taste = TASTES.get(plan.outer)
    if taste is not None and taste.refuses(plan.codecs):
        raise ConfigError(
            f"{plan.outer} cannot use this codec: {taste.why}",
            given=f"codec = {plan.codec!r}",
            expected=f"one of {', '.join(sorted(taste.taken))}" if taste.taken
            else f"a codec without {', '.join(sorted(taste.refused))}",
            remedy=f"codec = {taste.nearest!r}",
        )  # fmt: skip


def check_collective(plan: Plan) -> None:
    """Collectives are for members that can dial each other."""
    if plan.policy.collective != "auto" and plan.route == "relay":
        raise ConfigError(
            "collectives are for members that dial each other; over the relay the reducer adds up",
            given=f'collective = {plan.policy.collective!r} with route = "relay"',
            expected='route = "auto" or "direct"',
            remedy='leave collective away, or set route = "auto" in [job]',
        )


# ------------------------------------------------------------------------------- policies


def check_rounding(plan: Plan) -> None:
    """Partial sums that travel would be rounded on every hop."""
    if plan.codec != "fp32":
        plan.policy.check_codec(plan.codec)


def check_whole_vectors(plan: Plan) -> None:
    """Where each member sends other coordinates, most see zeros at each of them."""
    sparse = sorted(plan.codecs & GATHERING)
    if sparse and plan.policy.robust:
        raise ConfigError(
            f"codec {sparse[0]} leaves nothing for a robust rule to compare",
            given=f"codec = {plan.codec!r}, aggregate = {plan.policy.aggregate!r}, "
            f"admission = {plan.policy.admission!r}",
            expected="a codec that sends every coordinate, or the same ones on every member",
            remedy='codec = "feedback(int8)" or "feedback(randomk:0.01)"',
        )


def check_reducer(plan: Plan) -> None:
    """Rules that look at whole vectors, or remember, need one place that sees everything."""
    if plan.policy.needs_reducer and plan.route == "direct":
        raise ConfigError(
            "this rule needs one place that sees all contributions",
            given=f"aggregate = {plan.policy.aggregate!r}, admission = "
            f'{plan.policy.admission!r} with route = "direct"',
            expected='route = "relay" or "auto"',
            remedy='set route = "relay" in [job]; aggregate "median" and "trimmed:F" work directly',
        )


def check_members(plan: Plan) -> None:
    """Rules against F wrong members mean nothing below a number of members."""
    sizes = {"nodes": plan.nodes, "min_nodes": plan.min_nodes or plan.nodes}
    for name, members in sizes.items():
        try:
            plan.policy.check_members(members)
        except PeerLost as error:
            remedy, _, _ = (error.remedy or "").partition(";")
            raise ConfigError(
                f"too few members for the aggregate {plan.policy.aggregate}",
                given=f"{name} = {members}", expected=error.expected, remedy=remedy,
            ) from error  # fmt: skip


def check_aggregate(plan: Plan) -> None:
    """Where nobody makes one vector of all, there is nothing for a rule to do."""
    policy = plan.policy
    without = plan.outer in PAIRED | SERVED | SWAPPED
    if plan.outer == "sign_majority":  # with scales every vote is a packet of its own
        without = bool(plan.options["feedback"])
    if without and (policy.aggregate != "mean" or policy.admission != "finite"):
        raise ConfigError(
            f"{plan.outer} makes no mean of all members that a rule could replace",
            given=f"aggregate = {policy.aggregate!r}, admission = {policy.admission!r}",
            expected='aggregate = "mean" and admission = "finite"',
            remedy='a method with common rounds, e.g. preset = "diloco"',
        )
    if without and policy.collective != "auto":
        raise ConfigError(
            f"{plan.outer} makes no mean of all members that a collective could carry",
            given=f"collective = {policy.collective!r}", expected='collective = "auto"',
            remedy='for per-step training over collectives: preset = "ddp"',
        )  # fmt: skip


def check_sums(plan: Plan) -> None:
    """A sum of members' moves is too long, and buffers that travel along must not be summed."""
    if plan.policy.aggregate == "sum":
        raise ConfigError(
            "a sum of what members learned overshoots by their number",
            given=f'aggregate = "sum" with outer = {plan.outer!r}',
            expected='aggregate = "mean"',
            remedy='only gradients may be summed: preset = "ddp" with reduction = "sum"',
        )


# --------------------------------------------------------------------------------- options


def check_streaming_delay(plan: Plan) -> None:
    """A fragment's round must end before the next fragment's begins."""
    if plan.outer != "streaming":
        return
    every, fragments, delay = (plan.options[name] for name in ("every", "fragments", "delay"))
    if every < fragments:
        raise ConfigError(
            "there are more fragments than steps between their rounds",
            given=f"every = {every}, fragments = {fragments}",
            expected="at most one fragment a step",
            remedy=f"fragments = {every}, or every = {fragments}",
        )
    gap = every // fragments if plan.options.get("staggered", True) else every
    if delay >= gap:
        raise ConfigError(
            "a fragment's round would still be under way when the next one's begins",
            given=f"delay = {delay}, every = {every}, fragments = {fragments}",
            expected=f"delay below every / fragments, {gap} here",
            remedy=f"delay = {gap - 1}, or every = {(delay + 1) * fragments}",
        )


def check_nesterov(plan: Plan) -> None:
    """Nesterov's look ahead is the momentum's; without momentum there is nothing to look at."""
    name, momentum = plan.options.get("outer_optimizer"), plan.options.get("outer_momentum")
    if name in ("nesterov", "momentum") and momentum == 0:
        raise ConfigError(
            f"{name} without momentum is plain SGD",
            given=f"outer_optimizer = {name!r}, outer_momentum = 0",
            expected="outer_momentum above 0",
            remedy='outer_optimizer = "sgd", or outer_momentum = 0.9',
        )


def check_one_bit(plan: Plan) -> None:
    """What is frozen after the warm-up is Adam's variance."""
    if plan.outer == "onebit_adam" and plan.optimizer not in (
        "",
        "adamw",
        "torch:Adam",
        "torch:AdamW",
    ):
        raise ConfigError(
            "1-bit Adam freezes the variance of Adam, and this optimizer has none",
            given=f"optimizer = {plan.optimizer!r} in [train]",
            expected='optimizer = "adamw"',
            remedy='optimizer = "adamw", or preset = "signsgd" for any other',
        )


def check_island_gradients(plan: Plan) -> None:
    """The ranks of an island step by themselves; what others may have is parameters."""
    pushed = plan.outer == "server" and plan.options.get("optimizer", "member") != "member"
    if plan.inner != "local" and (plan.outer in ON_GRADIENTS or pushed):
        options = f", optimizer = {plan.options['optimizer']!r}" if pushed else ""
        raise ConfigError(
            f"{plan.outer} combines gradients, and those of an island stay inside",
            given=f"outer = {plan.outer!r}{options} with inner = {plan.inner!r}",
            expected="a method that combines parameters, e.g. average, diloco or streaming",
            remedy='optimizer = "member" in [strategy]' if pushed
            else 'outer = "average" with every = 1 in [strategy], or preset = "diloco"',
        )  # fmt: skip


def check_graph(plan: Plan) -> None:
    """Graphs have shapes: a torus is a grid, a ring has two neighbours."""
    if plan.outer != "gossip":
        return
    graph, nodes = str(plan.options["graph"]), plan.nodes
    if graph == "random" and not plan.options["push_sum"]:
        raise ConfigError(
            "in this graph some members get more than they give, which biases their mean",
            given='graph = "random" without push_sum',
            expected="push_sum = true, which undoes the bias",
            remedy='push_sum = true, or graph = "one-peer"',
        )
    if graph == "torus" and nodes > 1 and not is_grid(nodes):
        above = next(n for n in range(nodes, 2 * nodes + 9) if is_grid(n))
        raise ConfigError(
            "so many members make no torus",
            given=f"nodes = {nodes}",
            expected="a grid of at least 2 x 2 members, e.g. 4, 6, 8, 9 or 12",
            remedy=f'nodes = {above}, or graph = "exponential"',
        )


def is_grid(members: int) -> bool:
    """Return whether members can stand in rows and columns of two or more each."""
    return any(members % rows == 0 for rows in range(2, math.isqrt(members) + 1))


def check_backups(plan: Plan) -> None:
    """Backup workers are members whose gradients are not waited for."""
    backups = plan.options.get("backups", 0)
    if plan.outer == "server" and backups and backups >= plan.fewest:
        raise ConfigError(
            "nobody would be waited for",
            given=f"backups = {backups} with {plan.fewest} members",
            expected="backups below the number of members",
            remedy=f"backups = {max(0, plan.fewest - 1)}",
        )


def check_servers(plan: Plan) -> None:
    """Members reach parameter servers through the hub, whatever else they can dial."""
    if plan.outer in SERVED and plan.route == "direct" and plan.nodes > 1:
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
    check_streaming_delay,
    check_nesterov,
    check_one_bit,
    check_island_gradients,
    check_graph,
    check_backups,
    check_servers,
)
"""Every rule; each refuses, or says nothing."""
