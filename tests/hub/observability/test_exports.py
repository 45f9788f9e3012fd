"""Figures for others: the Prometheus page, the Grafana file, and OpenTelemetry."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atoll.errors import ConfigError
from atoll.hub.app import HubOptions
from atoll.hub.http.metric_families import Family
from atoll.hub.http.prometheus import render
from atoll.hub.server import HubServer
from atoll.hub.telemetry import Telemetry, _metrics_url
from tests.dashboard.scene import Scene
from tests.patience import PATIENCE_S

GRAFANA = Path(__file__).resolve().parents[3] / "deploy" / "grafana.json"
LINE = re.compile(r'(atoll_[a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\]|\\.)*)"')

ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def parsed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Read a page as Prometheus does."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            found[line.split()[2]] = []
        elif not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            labels = {
                name: re.sub(r"\\.", lambda m: ESCAPES[m[0]], value)
                for name, value in LABEL.findall(match[2] or "")
            }
            found[match[1]].append((labels, float(match[3])))
    return found


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


def test_labels_survive_whatever_is_in_them() -> None:
    odd = 'a"b\\c\nd{e="f",}'
    page = render([Family("atoll_x", "gauge", "Text.", [({"node": odd}, 1.5), ({}, None)])])
    assert parsed(page) == {"atoll_x": [({"node": odd}, 1.5)]}
    assert page.count("\n") == 3


@pytest.mark.parametrize(
    ("value", "text"), [(float("nan"), "NaN"), (float("inf"), "+Inf"), (float("-inf"), "-Inf")]
)
def test_non_finite_numbers_are_valid_prometheus(value: float, text: str) -> None:
    assert render([Family("atoll_x", "gauge", "T.", [({}, value)])]).endswith(f"atoll_x {text}\n")


def test_the_page_tells_of_nodes_jobs_queues_and_alarms(hub: HubServer) -> None:
    with Scene(hub) as scene:
        job = scene.submit("measured")
        scene.train(job, steps=20, rounds=1)
        scene.http.post("/api/queues/put", json={"queue": "q", "key": "a", "payload": "aGk="})
        deadline = time.monotonic() + PATIENCE_S
        while not scene.http.get("/api/alarms").json():
            assert time.monotonic() < deadline, "no alarm about the old version"
            time.sleep(0.05)
        found = parsed(scene.http.get("/metrics").text)

        def value(name: str, **labels: str) -> float:
            (one,) = [v for seen, v in found[name] if labels.items() <= seen.items()]
            return one

        assert value("atoll_node_online", node="attic-gpu") == 1
        assert value("atoll_node_paused", node="jonas-laptop") == 1
        assert value("atoll_node_gpu_percent", node="attic-gpu") == 96
        assert value("atoll_node_battery_percent", node="jonas-laptop") == 17
        assert value("atoll_node_up_bits_per_second", node="kitchen-1") == 94e6
        assert value("atoll_job_state", job=job) == 1
        assert value("atoll_job_members", job=job) == 2
        assert value("atoll_job_rounds_committed_total", job=job) == 1
        assert value("atoll_member_step", job=job, member="w1") == 20
        assert value("atoll_queue_items", queue="q", state="ready") == 1
        assert value("atoll_queue_bytes", queue="q") > 0
        assert value("atoll_alarm", kind="version-mismatch", node="jonas-laptop") == 1
        assert value("atoll_alarms", severity="warning") >= 1
        names = {name for name, samples in found.items()}
        used = set(re.findall(r"atoll_[a-z_]+", GRAFANA.read_text()))
        assert used <= names, used - names


def test_the_grafana_file_has_panels_that_do_not_overlap() -> None:
    dashboard = json.loads(GRAFANA.read_text())
    assert {v["name"] for v in dashboard["templating"]["list"]} == {"datasource", "job", "node"}
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


class Collector:
    """A real HTTP server that reads what an OpenTelemetry exporter posts."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.metrics: dict[str, Any] = {}
        self.resource: dict[str, str] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(self.path, body, self.headers.get("content-encoding", ""))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def take(self, path: str, body: bytes, encoding: str) -> None:
        import gzip

        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsServiceRequest,
        )

        self.paths.append(path)
        request = ExportMetricsServiceRequest.FromString(
            gzip.decompress(body) if encoding == "gzip" else body
        )
        for of_resource in request.resource_metrics:
            self.resource = {a.key: a.value.string_value for a in of_resource.resource.attributes}
            for scope in of_resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto", reason="the extra otel is not installed")
    made = Collector()
    yield made
    made.close()


def test_a_collector_gets_the_same_figures(tmp_path: Path, collector: Collector) -> None:
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False, otlp=collector.url
    )
    with HubServer(options) as hub:
        assert hub.hub is not None
        assert hub.hub.telemetry is not None
        with Scene(hub) as scene:
            job = scene.submit("told")
            scene.train(job, steps=20, rounds=1)
            telemetry: Any = hub.hub.telemetry
            hub.call(telemetry.gather())
            assert telemetry._provider.force_flush()
            page = parsed(scene.http.get("/metrics").text)
    assert set(collector.paths) == {"/v1/metrics"}
    assert collector.resource["service.name"] == "atoll-hub"
    step = collector.metrics["atoll_member_step"].gauge.data_points
    labels = {a.key: a.value.string_value for point in step for a in point.attributes}
    assert labels["job"] == job
    assert {point.as_double or float(point.as_int) for point in step} == {20.0}
    rounds = collector.metrics["atoll_job_rounds_committed_total"].sum
    assert rounds.is_monotonic
    assert [point.as_int for point in rounds.data_points] == [1]
    shown = {name for name, samples in page.items() if samples} - {"atoll_alarm"}
    assert shown <= set(collector.metrics), shown - set(collector.metrics)


def test_figures_that_are_gone_are_not_sent_again(collector: Collector) -> None:
    context: Any = SimpleNamespace(version="1")
    telemetry: Any = Telemetry(context, url=collector.url, every_s=3600.0)
    for name in ("atoll_swarm_paused", "atoll_jobs"):  # the SWARM has ended
        collector.metrics.clear()
        telemetry._take([Family(name, "gauge", "A figure.", [({}, 1.0)])])
        assert telemetry._provider.force_flush()
        assert set(collector.metrics) == {name}
    asyncio.run(telemetry.close())


def test_a_collector_that_is_away_holds_nothing_up(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False,
        otlp="http://127.0.0.1:9/v1/metrics",
    )  # fmt: skip
    with HubServer(options) as hub:
        assert (
            httpx.get(f"{hub.url}/healthz", trust_env=False, timeout=PATIENCE_S).status_code == 200
        )
        began = time.monotonic()
    assert time.monotonic() - began < 25


@pytest.mark.parametrize("url", ["", "collector:4318", "ftp://x", "http://"])
def test_what_is_no_address_of_a_collector_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not the URL of an OpenTelemetry collector"):
        _metrics_url(url)


def test_an_address_without_a_path_gets_the_usual_one() -> None:
    assert _metrics_url("http://h:4318") == _metrics_url("http://h:4318/")
    assert _metrics_url("http://h:4318") == "http://h:4318/v1/metrics"
    assert _metrics_url("https://h/otel/v1/metrics") == "https://h/otel/v1/metrics"


def test_without_the_library_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False, otlp="http://127.0.0.1:9"
    )
    with (
        pytest.raises(ConfigError, match="OpenTelemetry") as refused,
        contextlib.ExitStack() as open_,
    ):
        open_.enter_context(HubServer(options))
    assert "atoll[otel]" in (refused.value.remedy or "")
