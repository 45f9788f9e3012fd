"""Real processes that freeze or die in every phase of a round, on every route: the others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from atoll.group.base import Work
from atoll.group.run_round import CommittedMean
from atoll.hub.rounds import service
from atoll.hub.rounds.service import RoundService
from tests import warm
from tests.contracts.group_suite import assert_same_everywhere, one_round, values
from tests.group.hub_world import HubWorld, NodeInName, start_hub
from tests.group.victim import HIT, Victim, be_a_member
from tests.patience import PATIENCE_S
from tests.tiers import sampled

pytestmark = pytest.mark.e2e

SIZE = 400_000
"""7 pieces in fp32."""
SITES = {"w0": ("w2",), "w1": ("w3",), "w2": ("w0",), "w3": ("w1",)}
SILENT_S = 10 * PATIENCE_S
"""When a hub takes silence for death: where members are killed, only broken connections tell it."""
ABSENT_S = service.SILENT_S
"""When rounds no longer wait for a silent member: here only for one that was stopped."""


@pytest.fixture(scope="module")
def processes() -> Any:
    return warm.processes()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, NodeInName]]:
    """A node of a hub for each fault."""
    with (
        start_hub(tmp_path_factory.mktemp("kill"), dead_after_s=SILENT_S) as patient,
        start_hub(tmp_path_factory.mktemp("stop")) as hub,
    ):
        found = {"kill": NodeInName(patient), "stop": NodeInName(hub)}
        yield found
        for node in found.values():
            node.link.close()


class World(HubWorld):
    """All members but one on threads here; the victim is a process."""

    def __init__(self, node: NodeInName, n: int, *, victim: str, **options: Any) -> None:
        self.victim = victim
        super().__init__(node, n, **options)

    def _member(self, member: str, timeout_s: float) -> Any:
        return None if member == self.victim else super()._member(member, timeout_s)

    def start(self, processes: Any, *, moment: str, fault: str) -> tuple[Any, Connection]:
        """Start the victim; returns when it has registered."""
        self.groups = [group for group in self.groups if group is not None]
        near, far = processes.Pipe()
        reaches = SITES[self.victim] if self.route == "auto" else None
        task = Victim(
            self.hub.url, self.tokens[self.victim], self.job, self.victim, self.route, reaches,
            moment, HIT[fault], SIZE,
        )  # fmt: skip
        process = processes.Process(target=be_a_member, args=(task, far), daemon=True)
        process.start()
        far.close()
        assert near.poll(PATIENCE_S)
        assert near.recv() == "ready"
        return process, near


@pytest.fixture
def world(
    nodes: dict[str, NodeInName], processes: Any
) -> Iterator[Callable[..., tuple[World, Any, Any]]]:
    made: list[tuple[World, Any]] = []

    def make(route: str, victim: str, moment: str, fault: str) -> tuple[World, Any, Connection]:
        name, n = ("auto", 4) if route == "hierarchical" else (route, 3)
        sites = [("w0", "w2"), ("w1", "w3")] if route == "hierarchical" else ()
        here = World(nodes[fault], n, victim=victim, route=name, sites=sites)
        process, pipe = here.start(processes, moment=moment, fault=fault)
        made.append((here, process))
        return here, process, pipe

    yield make
    for here, process in made:
        process.kill()
        process.join(PATIENCE_S)
        here.close()


CASES = [
    (route, victim, moment)
    for route, victims, moments in [
        ("relay", ["w2"], ["joining", "exchanging", "voting"]),
        ("direct", ["w0", "w2"], ["connecting", "exchanging", "voting"]),
        ("hierarchical", ["w2"], ["connecting", "exchanging", "passing", "voting"]),
        ("hierarchical", ["w0"], ["connecting", "exchanging", "passing"]),
    ]
    for victim in victims
    for moment in moments
]


STOPPED = {
    "relay": [("w2", "exchanging"), ("w2", "voting")],
    "direct": [("w0", "exchanging"), ("w2", "connecting"), ("w2", "voting")],
    "hierarchical": [
        ("w0", "exchanging"), ("w0", "passing"), ("w2", "connecting"), ("w2", "voting"),
    ],
}  # fmt: skip
"""Where a member falls silent: each costs six seconds of waiting. Deaths are tried everywhere."""


SHORT = {
    ("relay", "w2", "exchanging", "stop"),
    ("direct", "w0", "connecting", "kill"),
    ("direct", "w2", "exchanging", "kill"),
    ("hierarchical", "w0", "passing", "kill"),
    ("relay", "w2", "voting", "kill"),
}
"""Of every route and moment one, and one silence."""


@pytest.mark.parametrize(
    ("route", "victim", "moment", "fault"),
    sampled(
        [
            *((*case, "kill") for case in CASES),
            *((route, *case, "stop") for route, cases in STOPPED.items() for case in cases),
        ],
        lambda case: case in SHORT,
        "tests/group/test_lost_processes.py::test_the_others_commit_the_round",
    ),
)
def test_the_others_commit_the_round(
    world: Callable[..., tuple[World, Any, Connection]],
    route: str,
    victim: str,
    moment: str,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, process, pipe = world(route, victim, moment, fault)
    is_silent = RoundService._is_silent

    def member(group: Any) -> CommittedMean:
        if moment != "connecting":
            one_round(group, values(group.me, (SIZE,)))
        return one_round(group, values(group.me, (SIZE,)))

    work = [Work.start(lambda g=g: member(g), name=g.me) for g in here.groups]  # type: ignore[misc]
    for expected in ("ready", "hit"):
        assert pipe.poll(PATIENCE_S)
        assert pipe.recv() == expected
    if fault == "stop":
        monkeypatch.setattr(
            RoundService, "_is_silent",
            lambda self, runtime, member, now: (
                member == victim and is_silent(self, runtime, member, now)
            ),
        )  # fmt: skip
        monkeypatch.setattr(service, "SILENT_S", ABSENT_S)
    agreed = [each.wait(PATIENCE_S) for each in work]
    assert_same_everywhere([one.reduced for one in agreed])
    survivors = [group.me for group in here.groups]
    contributors = list(agreed[0].reduced.contributors)
    assert [name for name in contributors if name != victim] == survivors
    if victim not in contributors:
        mean = sum(values(name, (SIZE,))[0] for name in survivors) / len(survivors)
        assert isinstance(mean, torch.Tensor)
        torch.testing.assert_close(agreed[0].reduced.tensors[0], mean)
    if fault == "stop":
        os.kill(process.pid, signal.SIGCONT)
        assert pipe.poll(PATIENCE_S)
        # Its vote may be late and still right; otherwise it learns that its attempt is over.
        over = {"LeftBehind", "PeerLost", "EpochChanged", "DeadlineExceeded"}
        assert pipe.recv() in over | {"committed"}
