"""What the REST interface and the dashboard read of a running hub."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hub.membership import Running
from tests.hub.peer import node


def test_nodes_are_listed_in_one_pass_over_the_jobs(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page asks for them twice a second, whatever the number of machines and of ended jobs."""
    hub = running.hub.hub
    assert hub is not None
    live, passes, list_jobs = hub.live, [], hub.stores.jobs.list

    def counted() -> Any:
        passes.append(1)
        return list_jobs()

    async def nodes() -> dict[str, list[str]]:  # the hub does nothing else meanwhile
        with monkeypatch.context() as patch:
            patch.setattr(hub.stores.jobs, "list", counted)
            return {view["node"]: sorted(view["running"]) for view in live.nodes()}

    with node(running.hub, "other"):
        found = running.hub.call(nodes())
    assert found == {"box": [f"{running.job}/w0", f"{running.job}/w1"], "other": []}
    assert len(passes) == 1
