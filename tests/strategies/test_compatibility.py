"""Combinations that cannot work are refused, with the reason and the nearest thing that works."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from atoll.codec.registry import make_codec
from atoll.config import StrategyTable, parse_spec
from atoll.errors import ConfigError
from atoll.group.aggregation import Aggregation
from atoll.methods.codecs import CODECS
from atoll.methods.decentralized import is_grid
from atoll.methods.table import METHODS, PRESETS
from atoll.strategies import compatibility
from atoll.strategies.compatibility import check
from atoll.strategies.measured_traffic import measure_traffic
from atoll.strategies.resolve import Resolved, read_method, resolve


def chosen(outer: str, codec: str = "fp32", *, inner: str = "local", **options: Any) -> Resolved:
    """Return an outer strategy with options and a codec."""
    return Resolved(method=read_method(outer, options), inner=inner, codec=codec)


def refusal(
    outer: str = "diloco",
    codec: str = "fp32",
    *,
    nodes: int = 4,
    min_nodes: int = 0,
    route: str = "auto",
    aggregation: Aggregation | None = None,
    **options: Any,
) -> ConfigError:
    """Return the error that a combination ends in."""
    resolved = chosen(outer, codec, **options)
    with pytest.raises(ConfigError) as caught:
        check(resolved, nodes=nodes, min_nodes=min_nodes, route=route, aggregation=aggregation)
    assert caught.value.given is not None
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_let_through_as_it_comes(preset: str, nodes: int) -> None:
    check(resolve(StrategyTable(preset=preset), steps=1_000), nodes=nodes)


@pytest.mark.parametrize("collective", ["ring", "butterfly", "tree", "hierarchical"])
def test_sparse_codec_is_refused_where_packets_are_summed(collective: str) -> None:
    aggregation = Aggregation(collective=collective)
    for codec in ("topk:0.01", "feedback(topk:0.1|int8)"):
        error = refusal("every_step", codec, aggregation=aggregation)
        assert "which codec topk does not allow" in error.what
        assert 'collective = "auto"' in str(error.remedy)
    assert "every hop" in refusal("every_step", "feedback(int8)", aggregation=aggregation).what
    check(
        chosen("every_step"),
        nodes=4,
        aggregation=aggregation,
    )
    check(resolve(StrategyTable(preset="ddp", codec="topk:0.01")), nodes=4)


def test_codecs_that_gather_are_known_by_their_names() -> None:
    for name, row in CODECS.items():
        if not row.wraps or row.needs_allgather:
            assert make_codec(row.example).needs_allgather is row.needs_allgather, name


@pytest.mark.parametrize(
    ("aggregate", "needed"),
    [("trimmed:1", 3), ("trimmed:2", 5), ("krum:1", 5), ("multi-krum:1:4", 5)],
)
def test_robust_rules_want_enough_members(aggregate: str, needed: int) -> None:
    aggregation = Aggregation(aggregate=aggregate)
    resolved = resolve(StrategyTable(preset="diloco"))
    check(resolved, nodes=needed, aggregation=aggregation)
    error = refusal(nodes=needed - 1, aggregation=aggregation)
    assert str(needed) in str(error.expected)
    error = refusal(nodes=8, min_nodes=needed - 1, aggregation=aggregation)
    assert f"min_nodes = {needed - 1}" in str(error.given)


def test_what_is_offered_instead_of_a_rule_works() -> None:
    error = refusal(nodes=4, aggregation=Aggregation(aggregate="krum:1"))
    nearest = str(error.remedy).split(" works")[0]
    check(resolve(StrategyTable()), nodes=4, aggregation=Aggregation(aggregate=nearest))


def test_robust_rules_want_vectors_that_can_be_compared() -> None:
    error = refusal("diloco", "feedback(topk:0.1)", aggregation=Aggregation(aggregate="median"))
    assert "randomk" in str(error.remedy)
    dense = chosen("diloco", "feedback(randomk:0.1)")
    check(dense, nodes=4, aggregation=Aggregation(aggregate="median"))


@pytest.mark.parametrize("aggregation", [{"aggregate": "geometric-median"}, {"admission": "norms"}])
def test_robust_rules_are_refused_where_nobody_sees_all(aggregation: dict[str, str]) -> None:
    error = refusal(route="direct", aggregation=Aggregation(**aggregation))
    assert 'route = "relay"' in str(error.remedy)
    for route in ("auto", "relay"):
        check(
            resolve(StrategyTable()), nodes=4, route=route, aggregation=Aggregation(**aggregation)
        )
    check(
        resolve(StrategyTable()),
        nodes=4,
        route="direct",
        aggregation=Aggregation(aggregate="median"),
    )


def test_collectives_are_refused_over_the_relay() -> None:
    error = refusal("every_step", route="relay", aggregation=Aggregation(collective="ring"))
    assert 'route = "auto"' in str(error.remedy)


def test_only_gradients_are_summed_and_not_buffers() -> None:
    aggregation = Aggregation(aggregate="sum")
    for outer in ("diloco", "every_step"):
        assert 'reduction = "sum"' in str(refusal(outer, aggregation=aggregation).remedy)


@pytest.mark.parametrize(
    "outer", [name for name, method in METHODS.items() if not method().has_mean]
)
def test_methods_without_mean_take_no_rule_or_collective(outer: str) -> None:
    for aggregation in (Aggregation(aggregate="median"), Aggregation(collective="ring")):
        assert "no mean of all" in refusal(outer, aggregation=aggregation).what


@pytest.mark.parametrize("outer", METHODS)
def test_codec_is_refused_exactly_where_the_method_does(outer: str) -> None:
    for example in (row.example for row in CODECS.values()):
        resolved = chosen(outer, example)
        try:
            measure_traffic(resolved, elements=500, peers=4, steps=4)
        except ConfigError:
            assert "cannot use this codec" in refusal(outer, example).what, example
        else:
            check(resolved, nodes=4)


@pytest.mark.parametrize("outer", [name for name, row in METHODS.items() if row.codecs])
def test_the_codec_that_is_offered_instead_works(outer: str) -> None:
    support = METHODS[outer].codecs
    assert support is not None
    unfit = "ef21(topk:0.1)" if "ef21" in support.refused else "feedback(topk:0.1)"
    offered = str(refusal(outer, unfit).remedy).split("'")[1]
    resolved = chosen(outer, offered)
    check(resolved, nodes=4)
    measure_traffic(resolved, elements=500, peers=4, steps=4)


@pytest.mark.parametrize("name", ["nesterov", "momentum"])
def test_momentum_of_nothing_is_refused(name: str) -> None:
    error = refusal("diloco", outer_optimizer=name, outer_momentum=0.0)
    assert "plain SGD" in error.what
    working: dict[str, Any] = {"outer_optimizer": "sgd", "outer_momentum": 0.0}
    check(resolve(StrategyTable(options=working)), nodes=4)
    chosen("diloco", **working).build()


@pytest.mark.parametrize(("every", "fragments", "delay"), [(10, 5, 2), (10, 4, 3), (3, 4, 0)])
def test_fragments_whose_rounds_would_overlap_are_refused(
    every: int, fragments: int, delay: int
) -> None:
    given: dict[str, Any] = {"every": every, "fragments": fragments, "delay": delay}
    error = refusal("streaming", **given)
    first, second = re.findall(r"(\w+) = (\d+)", str(error.remedy))
    for name, value in (first, second):
        options = given | {name: int(value)}
        resolved = chosen("streaming", **options)
        check(resolved, nodes=4)
        resolved.build()


@pytest.mark.parametrize("outer", ["streaming", "decoupled"])
def test_no_fragment_is_refused(outer: str) -> None:
    assert "one fragment or more" in refusal(outer, fragments=0).what


@pytest.mark.parametrize("nodes", [2, 3, 5, 7, 11])
def test_members_that_make_no_grid_are_refused_a_torus(nodes: int) -> None:
    error = refusal("gossip", nodes=nodes, graph="torus")
    offered = int(re.findall(r"nodes = (\d+)", str(error.remedy))[0])
    torus = chosen("gossip", graph="torus")
    check(torus, nodes=offered)
    assert is_grid(offered)


@pytest.mark.parametrize("inner", ["ddp", "fsdp", "tensor", "pipeline", "hybrid"])
def test_island_gradients_are_not_combined_with_others(inner: str) -> None:
    using = {"every_step", "powersgd", "demo", "sign_majority", "onebit_adam"}
    for outer in METHODS:
        resolved = chosen(outer, inner=inner)
        if outer not in using:
            compatibility.check_island_gradients(_plan(resolved))
            continue
        with pytest.raises(ConfigError, match="does not expose") as caught:
            compatibility.check_island_gradients(_plan(resolved))
        assert 'outer = "average"' in str(caught.value.remedy)
    pushed = resolve(StrategyTable(inner=inner, outer="server", options={"optimizer": "adamw"}))
    with pytest.raises(ConfigError, match="does not expose") as caught:
        check(pushed, nodes=2)
    assert 'optimizer = "member"' in str(caught.value.remedy)
    offered = resolve(StrategyTable(inner=inner, outer="average", options={"every": 1}))
    check(offered, nodes=2)


def test_only_some_methods_work_among_the_members_of_a_stage() -> None:
    for outer, method in METHODS.items():
        plan = dataclasses.replace(_plan(chosen(outer)), inner="swarm")
        compatibility.check_island_gradients(plan)
        if method.per_stage:
            compatibility.check_parts(plan)
            continue
        with pytest.raises(ConfigError, match="cannot work per stage") as caught:
            compatibility.check_parts(plan)
        assert caught.value.expected == "one of average, diloco, every_step"


@pytest.mark.parametrize("codec", ["lowrank:2", "feedback(lowrank:2)", "auto"])
def test_a_stage_refuses_codecs_with_a_common_state(codec: str) -> None:
    plan = dataclasses.replace(_plan(chosen("every_step", codec)), inner="swarm")
    with pytest.raises(ConfigError, match="a member new to a stage would need"):
        compatibility.check_parts(plan)
    compatibility.check_parts(dataclasses.replace(plan, codec="feedback(int8)"))


def _plan(resolved: Resolved) -> compatibility.Plan:
    return compatibility.Plan(
        method=resolved.method, codec=resolved.codec, nodes=2,
        min_nodes=2, route="auto", aggregation=Aggregation(), optimizer="adamw",
        inner=resolved.inner,
    )  # fmt: skip


def test_one_bit_adam_wants_adam() -> None:
    resolved = resolve(StrategyTable(preset="one-bit-adam"))
    check(resolved, nodes=4, optimizer="adamw")
    with pytest.raises(ConfigError, match="freezes the variance of Adam"):
        check(resolved, nodes=4, optimizer="sgd")


def test_uneven_graphs_want_push_sum() -> None:
    assert "push_sum = true" in str(refusal("gossip", graph="random").remedy)
    uneven = chosen("gossip", graph="random", push_sum=True)
    check(uneven, nodes=4)
    uneven.build()


def test_backups_leave_somebody_to_wait_for() -> None:
    assert "backups = 3" in str(refusal("server", nodes=4, backups=4).remedy)
    assert "backups = 1" in str(refusal("server", nodes=4, min_nodes=2, backups=2).remedy)


@pytest.mark.parametrize("outer", [name for name, row in METHODS.items() if row.needs_servers])
def test_parameter_servers_are_refused_without_the_relay(outer: str) -> None:
    assert "relay" in refusal(outer, route="direct").what
    check(chosen(outer), nodes=1, route="direct")


def test_every_rule_says_why_in_its_first_line() -> None:
    for rule in compatibility.RULES:
        assert rule.__doc__
        assert rule.__doc__.strip().endswith(".")


def test_bad_job_file_is_refused_by_command_and_worker() -> None:
    from atoll.cli.jobs.precheck import check_names
    from atoll.train.build import build

    spec = parse_spec(
        '[job]\nnodes = 4\n[strategy]\npreset = "diloco"\n'
        'outer_optimizer = "nesterov"\nouter_momentum = 0.0\n'
    )
    with pytest.raises(ConfigError, match="plain SGD"):
        check_names(spec)
    with pytest.raises(ConfigError, match="plain SGD"):
        build(spec, member="w0", slot=0, num_slots=4)
