"""Files of machines: what they say is kept, and what cannot be is refused by name."""

from __future__ import annotations

import pytest

from atoll.errors import ConfigError
from atoll.fleet.fleet import Fleet, Link, Machine
from atoll.fleet.measured import failures_of_events, fleet_of_nodes
from atoll.fleet.reading import dump_fleet, parse_fleet

HOME = """
[hub]
machine = "desk"

[[machines]]
name = "desk"
step_s = 0.5
memory_gb = 16
up_mbps = 20
down_mbps = 100
latency_ms = 10
site = "home"

[[machines]]
name = "attic"
count = 2
gflops = 120
memory_gb = 8
up_mbps = 20
down_mbps = 100
latency_ms = 12
site = "home"
hours_per_day = 9.5

[[machines]]
name = "office"
gflops = 300
memory_gb = 32
up_mbps = 500
down_mbps = 500
latency_ms = 30
price_per_hour = 0.4

[[sites]]
name = "home"
mbps = 900
latency_ms = 1

[[links]]
between = ["home", "office"]
mbps = 60
latency_ms = 25
"""


def machine(name: str, **figures: float) -> Machine:
    return Machine(name=name, **{"gflops": 100.0, "up_mbps": 10.0, "down_mbps": 50.0} | figures)  # type: ignore[arg-type]


def test_equal_machines_get_names_of_their_own() -> None:
    fleet = parse_fleet(HOME)
    assert [m.name for m in fleet.machines] == ["desk", "attic-1", "attic-2", "office"]
    assert fleet.machine("attic-2").share == pytest.approx(9.5 / 24)
    assert fleet.notes == ()


def test_a_written_fleet_is_read_as_the_same_one() -> None:
    fleet = parse_fleet(HOME)
    again = parse_fleet(dump_fleet(fleet))
    assert (again.machines, again.sites, again.links, again.hub) == (
        fleet.machines, fleet.sites, fleet.links, fleet.hub,
    )  # fmt: skip


def test_names_may_have_any_character() -> None:
    names = ["a\nb", 'quote " and \\', "tab\tand \x7f"]
    fleet = Fleet(
        machines=tuple(Machine(name=name, gflops=1.0) for name in names),
        links=(Link(between=names[:2], mbps=1.0),),
    )
    again = parse_fleet(dump_fleet(fleet))
    assert [machine.name for machine in again.machines] == names
    assert again.links == fleet.links


def test_paths_take_the_site_the_link_or_the_narrower_line() -> None:
    fleet = parse_fleet(HOME)
    desk, attic, office = fleet.of(["desk", "attic-1", "office"])
    assert fleet.between(desk, attic).bytes_per_s == 900e6 / 8
    assert fleet.between(desk, attic).round_trip_s == pytest.approx(0.001)
    # The link is faster than the line of the desk.
    assert fleet.between(desk, office).bytes_per_s == 20e6 / 8
    assert fleet.between(office, attic).bytes_per_s == 60e6 / 8
    assert fleet.all_reach(fleet.machines)
    assert fleet.to_hub(desk).round_trip_s == 0
    assert fleet.hub_rates_mbps == (100, 20)


def test_a_site_may_say_its_round_trip_alone() -> None:
    fleet = parse_fleet(HOME.replace("mbps = 900\n", ""))
    path = fleet.between(fleet.machine("desk"), fleet.machine("attic-1"))
    assert path.bytes_per_s == 20e6 / 8
    assert path.round_trip_s == pytest.approx(0.001)


def test_machines_without_site_or_link_do_not_reach_each_other() -> None:
    fleet = Fleet(machines=(machine("a"), machine("b", latency_ms=7), machine("c", latency_ms=5)))
    assert not fleet.all_reach(fleet.machines)
    linked = Fleet(machines=fleet.machines, links=(Link(between=["b", "c"]),))
    assert linked.all_reach(linked.machines[1:])
    assert linked.between(*linked.machines[1:]).round_trip_s == pytest.approx(0.012)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no machines"),
        ("[[machine]]", "unknown table"),
        ("[[machines]]\ngflops = 3", "has no name"),
        ('[[machines]]\nname = "a"\ngflop = 3', "gflop in .*did you mean|gflops"),
        ('[[machines]]\nname = "a"\nup_mbps = -1', "up_mbps"),
        ('[[machines]]\nname = "a"\n[[machines]]\nname = "a"', "the same name"),
        ('[[machines]]\nname = "a"\n[[links]]\nbetween = ["a", "b"]', "end of a link"),
        ('[[machines]]\nname = "a"\n[[links]]\nbetween = ["a", "a"]', "to itself"),
        ('[[machines]]\nname = "a"\n[[links]]\nbetween = ["a"]', "two ends"),
        ('[[machines]]\nname = "a"\n[[sites]]\nname = "b"', "site of a machine"),
        ('[[machines]]\nname = "a"\n[hub]\nmachine = "b"', r"machine in \[hub\]"),
        ("[[machines]", "not valid TOML"),
        ('machines = "a"', "not a list of tables"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_fleet(text)


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ("step_s = 1e-9", "no machine does a step in the time of a"),
        ("latency_ms = 2e6", "no connection has the round trip of a"),
    ],
)
def test_figures_that_no_machine_has_are_refused(figure: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_fleet(f'[[machines]]\nname = "a"\n{figure}\n')


def test_links_that_contradict_each_other_are_refused() -> None:
    twice = HOME + '[[links]]\nbetween = ["home", "office"]\nmbps = 90\nlatency_ms = 25\n'
    with pytest.raises(ConfigError, match=r"contradict each other.*home -> office: 60 and 90"):
        parse_fleet(twice)


def test_what_a_file_does_not_say_is_noted() -> None:
    fleet = parse_fleet(
        '[[machines]]\nname = "a"\n[[machines]]\nname = "b"\ngflops = 3\nup_mbps = 9'
    )
    assert fleet.notes == (
        "the speed of a is not known",
        "the line to the hub of a, b is not known",
        "the memory of a, b is not known",
        "the round trip of b to the hub is not given: taken as 0",
        "the hub's own line is not given in [hub]: it does not limit",
    )


ROW = {
    "node": "n1", "state": "online",
    "info": {"matmul_gflops": 88.5, "memory_bytes": 8_000_000_000, "gpu_memory_bytes": 0},
    "stats": {"up_bps": 18e6, "down_bps": 90e6, "latency_ms": 22.0},
}  # fmt: skip


def test_a_hubs_nodes_become_machines() -> None:
    limited = ROW | {"node": "n2", "info": {**ROW["info"], "offer": {"upload_bps": 5e6}}}  # type: ignore[dict-item]
    lost = ROW | {"node": "n3", "state": "lost"}
    left = ROW | {"node": "n4", "state": "left"}
    rows = [ROW, limited, lost, left]
    fleet = fleet_of_nodes(rows, step_s={"n1": 0.25}, failures_per_day={"n2": 2.0})
    assert [m.name for m in fleet.machines] == ["n1", "n2"]
    assert fleet.machine("n1") == Machine(
        name="n1", step_s=0.25, gflops=88.5, memory_gb=8, up_mbps=18, down_mbps=90, latency_ms=22
    )
    assert fleet.machine("n2").up_mbps == 5
    assert fleet.machine("n2").failures_per_day == 2


def test_a_hub_without_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="no machine is online"):
        fleet_of_nodes([ROW | {"state": "lost"}])


def test_failures_count_from_the_first_event_of_the_hub() -> None:
    day = [
        {"time": 0.0, "kind": "hub-started", "text": ""},
        {"time": 100.0, "kind": "node-lost", "text": "n1 does not answer"},
        {"time": 200.0, "kind": "node-lost", "text": "n1 does not answer"},
    ]
    assert failures_of_events(day, now=86_400.0) == {"n1": 2.0}
    assert failures_of_events(day, now=300.0) == {}
