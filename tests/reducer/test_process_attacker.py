from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.errors import AtollError, GroupError
from atoll.group.aggregation import Aggregation
from atoll.group.base import Group
from atoll.group.period import PeriodReport
from atoll.group.run_round import CommittedMean
from atoll.hub.rounds import service
from atoll.hub.scheduler import reducer_hosts
from atoll.net.http.client import HubClient
from atoll.rounds import timing
from tests.contracts.group_suite import assert_same_everywhere, one_round, values
from tests.group.hub_world import NodeInName, start_hub
from tests.patience import PATIENCE_S
from tests.reducer.test_process import ProcessWorld

ROUNDS, SIZE = 5, 2000


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessWorld]:
    monkeypatch.setattr(reducer_hosts, "START_S", PATIENCE_S)  # as in test_process.py
    monkeypatch.setattr(timing, "MIN_GRACE_S", PATIENCE_S)
    monkeypatch.setattr(service, "SILENT_S", PATIENCE_S)
    with start_hub(tmp_path) as hub:
        node = NodeInName(hub)
        world = ProcessWorld(node, 5, route="auto")
        yield world
        print("the reducer's status before its end:", world.process.poll())
        world.process.kill()
        print(world.process.communicate(timeout=PATIENCE_S)[1])
        world.close()
        node.link.close()


def test_attacker_is_excluded_over_a_real_hub(world: ProcessWorld) -> None:
    """All are on one machine, yet the values go to the reducer, which sees all of them apart."""
    aggregation = Aggregation(aggregate="geometric-median", admission="norms")

    def member(group: Group) -> list[CommittedMean]:
        group.aggregation = aggregation
        done = []
        for round_ in range(ROUNDS):
            xs = values(group.me, (SIZE,), seed=round_)
            if group.me == "w3":
                xs = [torch.full((SIZE,), 1e30)]
            done.append(one_round(group, xs, round_=round_))
        return done

    results = world.run(member)
    error = results.pop(3)
    assert isinstance(error, GroupError), error
    assert "3 times within 20 rounds" in str(error)
    honest = [result for result in results if not isinstance(result, BaseException)]
    assert len(honest) == 4, results
    for round_ in range(ROUNDS):
        agreed = [rounds[round_] for rounds in honest]
        assert_same_everywhere([one.reduced for one in agreed])
        assert {one.plan.route for one in agreed} == {"relay"}
        assert agreed[0].reduced.contributors == ("w0", "w1", "w2", "w4")
        stacked = torch.stack([values(f"w{s}", (SIZE,), seed=round_)[0] for s in (0, 1, 2, 4)])
        away = float((agreed[0].reduced.tensors[0] - stacked.mean(0)).norm())
        assert away < 0.1 * float(stacked[0].norm())
    with HubClient(world.hub.url, world.hub.operator_token) as client:
        events = client.events(world.job)["events"]
    texts = [e["text"] for e in events if e["kind"] == "contribution-left-out"]
    assert len(texts) >= 3
    assert all("w3" in text for text in texts)
    assert any(e["kind"] == "contribution-refused" and "w3" in e["text"] for e in events)


def test_too_many_attackers_stop_the_rounds(
    world: ProcessWorld,
) -> None:
    """Two of five are more than a third: nothing is committed, all receive the reason."""
    received = threading.Barrier(5)

    def member(group: Group) -> str:
        group.aggregation = Aggregation(admission="norms")
        factor = 1e6 if group.me in ("w3", "w4") else 1.0
        group.join(PeriodReport(0, "base"))
        (x,) = values(group.me, (SIZE,))
        with pytest.raises(AtollError) as caught:
            group.reduce([x * factor], codec=make_codec("fp32"), weight=1.0).wait()
        received.wait(PATIENCE_S)  # a vote against ends the wait of those who have not heard yet
        verdict = group.commit(None, ok=False, reason="nothing came")
        assert not verdict.committed
        return str(caught.value)

    for text in world.run(member):
        assert isinstance(text, str), text
        assert "more than a third" in text
        assert "from w3" in text
