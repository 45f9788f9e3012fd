"""Members with models of their own: real hub, agents and workers, one of them killed."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import ENDLESS, Atoll, ticket_of, until
from tests.e2e.test_elastic import ALL, contributors, kinds, stop

pytestmark = pytest.mark.e2e


@pytest.mark.long(
    "tests/strategies/outer/test_gossip_routes.py::test_survivors_of_a_lost_member_end_with_one_model"
)
@pytest.mark.parametrize("preset", ["d-psgd", "ad-psgd"])
def test_a_killed_member_becomes_a_copy_of_one_donor(atoll: Atoll, preset: str) -> None:
    # Far more steps than are needed: it is stopped when everything was seen.
    job = atoll.job(steps=ENDLESS, every=10, paced=True, nodes="3", preset=f'"{preset}"')
    hub = atoll.hub()
    for name in ("one", "two", "three"):
        atoll.join(ticket_of(hub), name=name)
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 3)
        name = client.submit(job.read_text())
        until(lambda: client.job(name)["committed_round"] >= 4)
        atoll.worker("w1").kill()
        until(lambda: "recovered" in kinds(client, name))
        before = client.job(name)["committed_round"]
        until(lambda: client.job(name)["committed_round"] > before + 5)
        assert ALL in contributors(client, name, since=0)
        members = stop(client, name)
        told = kinds(client, name)
    assert "recovery-source-refused" not in told, "members differ on purpose"
    results = [member["result"] for member in members]
    assert len({result["digests"] for result in results}) == 1, "all agree on every round"
    assert len({result["digest"] for result in results}) == 3, "and carry models of their own"
