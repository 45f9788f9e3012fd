"""A member on a lent machine, in its sandbox, trains with one that is not in any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.node.launchers import landlock
from bench.attack.session import until
from bench.attack.site import Site, trainer_job
from bench.kit.cluster import Cluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not landlock.keeps_ports(), reason="this kernel keeps no network apart"),
]


def test_training_goes_on_where_only_the_hub_is_reached(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", hub_options=("--tls", "on")) as cluster:
        cluster.start_hub()
        site = Site(cluster, tmp_path / "data")
        for name in ("lent", "own"):
            home = cluster.folder / "nodes" / name
            home.mkdir(parents=True)
            policy = f'sandbox = "on"\nreadable = [{json.dumps(str(site.folder))}]\n'
            (home / "node.toml").write_text(policy if name == "lent" else "", encoding="utf-8")
            cluster.start_node(name)
        cluster.wait_for_nodes(2)
        spec = trainer_job(site, "mixed", on=["lent", "own"], steps=30, nodes="2")
        # The members may connect to each other; the one in the sandbox goes through the hub.
        job = cluster.client.submit(spec.replace('route = "relay"', 'route = "auto"'))
        view = until(lambda: (v := cluster.client.job(job))["ended"] and v, "it ends", wait_s=400.0)
        assert view["state"] == "done", view["reason"]
        results = [member["result"] for member in view["members"]]
        assert len({result["digest"] for result in results}) == 1
        assert view["committed_round"] >= 3
