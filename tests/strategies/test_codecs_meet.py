"""Every codec under a strategy: in memory, over the relay and directly, to the bit and the byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from atoll.codec.wrappers.auto import auto_inside
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.ids import session_id
from atoll.methods.codecs import CODECS
from atoll.methods.every_step import EveryStep
from atoll.methods.periodic import Average
from atoll.net.endpoint import PLAIN, HubEndpoint
from atoll.net.handshake import make_hello
from atoll.net.sync_link import SyncLink, connect
from tests.contracts.group_suite import together
from tests.contracts.strategy_suite import Run, batches, start_run, train_together
from tests.group.hub_world import HubWorld, NodeInName
from tests.strategies.on_routes import wide_model

STEPS = 4
SPECS = [
    *(row.example for row in CODECS.values()),
    "topk:0.3|int8", "randomk:0.5|topk:0.5|int4", "feedback(topk:0.2)", "feedback(randomk:0.25)",
    "feedback(lowrank:1)", "feedback(int2)", "feedback(sign)",
]  # fmt: skip
ROUTED = [
    "topk:0.3|int8", "feedback(randomk:0.25)", "feedback(lowrank:1)", "by_role(sign,bf16)",
    "ef21(topk:0.2)", "feedback(e3m0)", "sigma8", "qsgd", "dct:64", "feedback(auto)",
]  # fmt: skip
EXACT_ROUTES = ["relay", "direct"]


def traffic_is_a_formula(spec: str) -> bool:
    return "auto" not in spec  # what it chooses, and its questions about the link, are not


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        *((spec, Average(every=2)) for spec in SPECS),
        *((spec, EveryStep()) for spec in ("feedback(topk:0.2)", "ef21(int4)", "randomk:0.1")),
    ],
)
@pytest.mark.every(3)
def test_members_stay_identical_and_send_what_the_formula_says(
    spec: str, options: Average | EveryStep
) -> None:
    runs = train_together(options, members=3, steps=STEPS, codec=spec)
    again = train_together(options, members=3, steps=STEPS, codec=spec)
    for run, repeated in zip(runs, again, strict=True):
        assert torch.equal(run.vector(), runs[0].vector())
        assert torch.equal(run.vector(), repeated.vector())
        assert torch.isfinite(run.vector()).all()
    expected, start = runs[0].outer.traffic(26, 3, steps=STEPS), 128
    if traffic_is_a_formula(spec):
        sent = sum(result.sent_bytes for result in runs[0].results)
        received = sum(result.received_bytes for result in runs[0].results)
        assert sent + start == expected.relay_sent_bytes
        assert received + start == expected.relay_received_bytes


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.every(3)
def test_saved_and_loaded_in_mid_run_equals_uninterrupted(spec: str) -> None:
    options = Average(every=1)
    whole = train_together(options, members=2, steps=STEPS, codec=spec)

    def interrupted(group: Group) -> Run:
        slot = int(group.me[1:])
        first = start_run(options, group, slot, codec=spec)
        first.train(2)
        outer = {k: v.clone() for k, v in first.outer.state_dict().items()}
        second = start_run(options, group, slot, codec=spec, model=first.task.model, begin=False)
        second.task.optimizer.load_state_dict(first.task.optimizer.state_dict())
        second.task.step, second.task.tokens = first.task.step, first.task.tokens
        second.task.round = first.task.round
        second.outer.load_state_dict(outer)
        second.stream = batches(slot, start=2)
        second.train(STEPS - 2)
        return second

    halves = MemoryGroups(2).together(interrupted)
    assert torch.equal(whole[0].vector(), halves[0].vector())
    assert torch.equal(halves[0].vector(), halves[1].vector())


# ----------------------------------------------------------------------- the real routes


@pytest.mark.parametrize("spec", ROUTED)
@pytest.mark.parametrize("route", EXACT_ROUTES)
@pytest.mark.every(7)
def test_real_routes_are_identical_and_close_to_memory(
    world: Callable[..., HubWorld], route: str, spec: str
) -> None:
    options, model = Average(every=1), wide_model()
    place = world(3, route=route)

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]), codec=spec, model=model)
        run.train(STEPS)
        return run

    runs = together(place, body)
    for other in runs[1:]:
        assert torch.equal(other.vector(), runs[0].vector())
    if not traffic_is_a_formula(spec):
        return
    memory = train_together(options, members=3, steps=STEPS, codec=spec, model=model)[0].vector()
    if route == "relay":
        assert torch.equal(runs[0].vector(), memory)
    exact = train_together(options, members=3, steps=STEPS, model=model)[0].vector()
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    # As far from plain averaging as in memory, give or take what chunks change in rounding.
    far = float((memory - exact).norm())
    assert float((runs[0].vector() - exact).norm()) < 1.3 * far + 0.02 * float(
        (exact - start).norm()
    )
    for rank, group in enumerate(place.groups):
        expected = runs[rank].outer.traffic(32_002, 3, steps=STEPS, rank=rank)
        sent = expected.relay_sent_bytes if route == "relay" else expected.direct_sent_bytes
        assert group.sent_bytes == pytest.approx(sent, rel=0.03, abs=1000)


class SlowWorld(HubWorld):
    """Members that may send 8 Mbit/s."""

    def connect(self, member: str) -> SyncLink:
        endpoint = HubEndpoint(upload_bps=8e6) if member != "reducer" else PLAIN
        link = connect(
            self.hub.url,
            make_hello(session_id(self.job, member), self.tokens[member]),
            endpoint=endpoint,
        )
        self.links[member] = link
        return link


def test_auto_finds_a_slow_uplink_and_members_finish_identical(node: NodeInName) -> None:
    place, model = SlowWorld(node, 2, route="relay"), wide_model()

    def body(group: Group) -> tuple[list[str], Run]:
        run = start_run(
            Average(every=1), group, int(group.me[1:]), codec="feedback(auto)", model=model
        )
        used = []
        for _ in range(STEPS):
            auto = auto_inside(run.outer._codec)  # type: ignore[attr-defined]
            assert auto is not None
            used.append(auto.base.spec)
            run.train(1)
        return used, run

    try:
        (first, one), (second, other) = together(place, body)
    finally:
        place.close()
    assert first == second
    assert (first[0], first[-1]) == ("fp32", "int4:256")
    assert torch.equal(one.vector(), other.vector())
    assert one.results[-1].sent_bytes < one.results[0].sent_bytes / 6
