"""What `atoll doctor` says of machines: speed, the weakest hop, and what a plan misses."""

from __future__ import annotations

import socket

import pytest

from atoll.cli.checks import (
    check_fleet_figures,
    check_hub,
    check_lines,
    check_matmul,
    check_port,
)
from atoll.cli.hub_access import KnownHub
from atoll.fleet.reading import parse_fleet
from atoll.node.machine.probe import Compute


@pytest.mark.parametrize(("gflops", "passed"), [(0.0, None), (0.4, None), (120.0, True)])
def test_machine_that_computes_next_to_nothing_does_not_pass(
    gflops: float, passed: bool | None
) -> None:
    found = check_matmul(Compute(gflops))
    assert found.passed is passed
    assert ("very slow" in found.text) is (passed is None)


FLEET = """
[[machines]]
name = "desk"
gflops = 200
memory_gb = 16
up_mbps = 20
down_mbps = 100
latency_ms = 12

[[machines]]
name = "attic"
gflops = 90
memory_gb = 8
up_mbps = 40
down_mbps = 50
latency_ms = 61
"""
LINK = '[[links]]\nbetween = ["desk", "attic"]\nmbps = 3.5\n'


def said_of(text: str) -> list[str]:
    return [f"{check.name}: {check.text}" for check in check_fleet_figures(parse_fleet(text))]


def test_the_weakest_hop_is_that_to_the_hub_or_between_nodes() -> None:
    assert said_of(FLEET) == [
        "lines: lines between the machines were not measured: plans take the relay for them",
        "lines: the weakest hop of 4: desk to the hub, 20.0 Mbit/s; "
        "the farthest machine: attic, 61 ms",
    ]
    assert said_of(FLEET + LINK) == [
        "lines: the weakest hop of 5: desk to attic, 3.5 Mbit/s; the farthest machine: attic, 61 ms"
    ]


def test_what_a_plan_misses_is_said_with_a_remedy() -> None:
    found = list(check_fleet_figures(parse_fleet(FLEET.replace("gflops = 90\n", "") + LINK)))
    assert found[0].text == "attic: the speed was not measured yet"
    assert found[0].passed is None
    assert "atoll join" in found[0].remedy


def test_a_port_on_which_a_program_listens_is_taken() -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        found = check_port(port)
    assert found.passed is None
    assert found.text == f"{port} is taken (a program answers there)"
    assert check_port(port).passed


def test_a_hub_that_goes_away_fails_checks_and_ends_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hub = KnownHub(f"http://127.0.0.1:{port}", "token", operator=True)
    found = [*check_hub(hub), *check_lines(hub)]
    assert [check.name for check in found] == ["clock", "download", "upload", "lines"]
    assert not any(check.passed or check.needed for check in found)
