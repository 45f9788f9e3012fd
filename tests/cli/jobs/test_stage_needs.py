"""A SWARM that fits no machine is refused before it is submitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from atoll.cli.hub_access import KnownHub
from atoll.cli.jobs.jobfile import Submission
from atoll.cli.jobs.stage_needs import check_offered, with_stage_needs
from atoll.cli.main import app
from atoll.config import JobSpec, dump_spec, parse_spec
from atoll.errors import ConfigError
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.plan.swarm import plan_swarm
from atoll.wire.messages import NodeInfo, Offer
from tests.hub.peer import Peer
from tests.patience import PATIENCE_S
from tests.plan.test_swarm_plan import swarm


def node(name: str, memory_bytes: int, *, state: str = "online", **more: Any) -> dict[str, Any]:
    info = NodeInfo(name, "Linux", "3.11", "0.1", memory_bytes=memory_bytes, slots=1, **more)
    return {"node": name, "state": state, "info": msgspec.to_builtins(info)}


def sized(folder: Path, stages: int = 2) -> JobSpec:
    return with_stage_needs(Submission(swarm(folder, stages), {})).spec


def test_job_names_what_each_stage_needs(tmp_path: Path) -> None:
    spec = sized(tmp_path)
    plan = plan_swarm(swarm(tmp_path))
    assert spec.swarm.cuts == list(plan.cuts)
    assert spec.swarm.needs_gb == [round(plan.needs_bytes(s) / 1e9, 6) for s in plan.stages]
    assert parse_spec(Submission(spec, {}).text).swarm == spec.swarm
    plain = replace(spec, swarm=replace(spec.swarm, stages=0, needs_gb=[]))
    assert with_stage_needs(Submission(plain, {})).spec is plain


def test_stages_that_fit_no_node_name_how_many_would(tmp_path: Path) -> None:
    spec = sized(tmp_path, 1)
    four = plan_swarm(swarm(tmp_path, 4)).worst_bytes
    nodes = [node("lap1", four + 1_000), node("big", 10**12, state="lost")]
    with pytest.raises(ConfigError, match=r"fit no offered node.*lap1 offers.*stages = [234] in"):
        check_offered(spec, nodes)
    check_offered(spec, [*nodes, node("lap2", 10**12)])
    kept = node("lap3", 10**12, offer=Offer(memory_bytes=four))
    with pytest.raises(ConfigError, match="as lap1 offers"):
        check_offered(spec, [node("lap1", four + 1_000), kept])


def test_without_any_machine_the_job_waits(tmp_path: Path) -> None:
    check_offered(sized(tmp_path), [])


def test_memory_of_an_accelerator_counts_where_it_computes(tmp_path: Path) -> None:
    spec = sized(tmp_path)
    small: dict[str, Any] = {"gpu": "A", "gpu_memory_bytes": 1_000}
    with pytest.raises(ConfigError, match="fit no offered node"):
        check_offered(spec, [node("gpu", 10**12, **small)])
    check_offered(spec, [node("gpu", 10**12, offer=Offer(device="cpu"), **small)])
    check_offered(spec, [node("gpu", 10**12, idle="no driver", **small)])


def test_run_refuses_before_it_submits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.toml"
    path.write_text(dump_spec(swarm(tmp_path, 2)), encoding="utf-8")
    options = HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs", reducers=False)
    with (
        HubServer(options) as hub,
        httpx.Client(base_url=hub.url, trust_env=False, timeout=PATIENCE_S) as http,
    ):
        body = {"secret": hub.ticket.rpartition("/")[2], "name": "lap1"}
        token = http.post("/api/join", json=body).json()["token"]
        info = NodeInfo("lap1", "Linux", "3.11", "0.1", memory_bytes=10**8, slots=2)
        known = KnownHub(hub.url, hub.operator_token, operator=True)
        monkeypatch.setattr("atoll.cli.hub_access.find", lambda _, without: known)
        with Peer(hub, "lap1", info=info, token=token), known.client() as client:
            found = CliRunner().invoke(app, ["run", str(path), "--detach"])
            assert isinstance(found.exception, ConfigError)
            assert "as lap1 offers" in str(found.exception)
            assert client.jobs() == []
            away = {**body, "name": "b"}  # it has joined, and is not connected
            other = http.post("/api/join", json=away).json()["token"]
            Peer(
                hub,
                "b",
                info=msgspec.structs.replace(info, hostname="b", memory_bytes=10**12),
                token=other,
            ).close()
            large = CliRunner().invoke(app, ["run", str(path), "--detach", "--set", 'job.on=["b"]'])
            assert large.exit_code == 0, large.exception  # it waits for a machine that is away
            (job,) = client.jobs()
            assert len(parse_spec(client.job(job["job"])["spec"]).swarm.needs_gb) == 2
