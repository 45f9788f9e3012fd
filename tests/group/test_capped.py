"""Processes on machines whose owner limits the bandwidth."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from atoll.config import WorkerEnvironment, read_worker_environment, worker_variables
from atoll.errors import ConfigError
from atoll.group.connect import connect_group
from atoll.net.endpoint import endpoint_of

WORKER = WorkerEnvironment(
    hub="http://127.0.0.1:9", token="t", job="j", member="w0",
    directory=Path("j"), spec=Path("j/job.toml"),
)  # fmt: skip


@pytest.mark.parametrize("limit", ["upload_bps", "download_bps"])
def test_capped_process_refuses_an_uncapped_route(limit: str) -> None:
    capped = dataclasses.replace(WORKER, **{limit: 1e6})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='route = "auto"'):
        connect_group(capped, route="direct")


def test_limits_reach_the_process_by_its_environment() -> None:
    capped = dataclasses.replace(
        WORKER, upload_bps=2.5e6, download_bps=1e7, pace="home/pace", proxy="http://p:1"
    )
    environment = read_worker_environment(worker_variables(capped))
    assert environment == capped
    way = endpoint_of(environment)
    assert (way.upload_bps, way.download_bps, way.pace) == (2.5e6, 1e7, "home/pace")
    assert not WORKER.relayed
    assert not read_worker_environment(worker_variables(WORKER)).relayed  # type: ignore[union-attr]
