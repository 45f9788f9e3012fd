"""Behind a real nginx with a path prefix: join, train, follow, upload."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.sync_link import connect
from atoll.wire.messages import Beat, Done
from bench.kit.ports import free_port
from tests.e2e.conftest import TINY, until
from tests.patience import PATIENCE_S
from tests.proxy.nginx import DOCUMENTED, ROOT, Nginx

pytestmark = pytest.mark.skipif(
    not (shutil.which("nginx") or Path("/usr/sbin/nginx").exists()), reason="there is no nginx here"
)

TEXT = "the quick brown fox jumps over the lazy dog " * 400


@pytest.fixture(params=[True, False], ids=["prefix-taken-off", "prefix-kept"])
def site(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[HubServer, Nginx]]:
    """Start a hub behind nginx; this process trusts its certificate."""
    port = free_port()
    options = HubOptions(
        data=tmp_path / "hub",
        jobs=tmp_path / "runs",
        advertise=f"https://localhost:{port}/atoll",
        trust_proxy=("127.0.0.1",),
    )
    with HubServer(options) as hub:
        folder = tmp_path / "nginx"
        folder.mkdir()
        with Nginx(folder, port=port, hub_port=hub.port, strips=request.param) as nginx:
            monkeypatch.setenv("SSL_CERT_FILE", str(nginx.certificate))
            yield hub, nginx


def test_sessions_long_polls_and_large_uploads_pass(site: tuple[HubServer, Nginx]) -> None:
    hub, nginx = site
    url = f"https://localhost:{nginx.port}/atoll"
    with HubClient(url, hub.operator_token) as client:
        client.health()
        assert client.hub()["version"]
        client.upload_bps(40 * 2**20)
        client.download_bps(8 * 2**20)
        spec = '[job]\nname = "later"\nscript = "s.py"\n'
        job = client.submit(spec, files={"s.py": "print(1)"})
        started = time.monotonic()
        client.logs(job, wait_s=1.5)  # nobody runs it: the hub answers when the time is up
        assert time.monotonic() - started > 1.0
        sha256 = client.put_file(job, "big.bin", bytes(30 * 2**20))
        target = nginx.certificate.with_name("big.bin")
        assert client.get_file(job, "big.bin", target) == sha256
        client.stop(job, grace_s=0.0)
    with connect(url, make_hello("p/w0", hub.operator_token)) as link:
        assert isinstance(link.request(Beat(), timeout_s=PATIENCE_S), Done)
    assert any('"GET /atoll/ws HTTP/1.1" 101' in line for line in nginx.requests)


def test_the_page_and_its_live_stream_work_below_the_prefix(
    site: tuple[HubServer, Nginx],
) -> None:
    hub, nginx = site
    trusted = ssl.create_default_context(cafile=str(nginx.certificate))
    with httpx.Client(
        base_url=f"https://localhost:{nginx.port}",
        verify=trusted,
        trust_env=False,
        timeout=PATIENCE_S,
    ) as browser:
        page = browser.get(f"/atoll?token={hub.operator_token}", follow_redirects=True)
        assert page.status_code == 200
        assert page.url.path == "/atoll/"
        assert 'href="/' not in page.text
        assert 'src="/' not in page.text
        named = re.findall(r'(?:src|href)="(static/[^"]+)"', page.text)
        assert named
        for name in named:
            assert browser.get(f"/atoll/{name}").status_code == 200, name
        with browser.stream("GET", "/atoll/api/stream", timeout=PATIENCE_S) as stream:
            assert stream.status_code == 200
            assert next(line for line in stream.iter_lines() if line.startswith("data:"))


@pytest.mark.e2e
@pytest.mark.parametrize("site", [True], indirect=True, ids=["prefix-taken-off"])
def test_a_node_joins_through_nginx_with_the_ticket_and_trains(
    site: tuple[HubServer, Nginx], tmp_path: Path
) -> None:
    hub, nginx = site
    assert hub.ticket.startswith(f"atoll://localhost:{nginx.port}/atoll/")
    assert hub.ticket.endswith("~tls")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    spec = TINY.format(text=text, model="gpt", steps=20, every=10).replace("nodes = 2", "nodes = 1")
    agent = subprocess.Popen(
        [
            *(sys.executable, "-m", "atoll.node", "--no-measure", "--name", "box"),
            *("--ticket", hub.ticket, "--home", str(tmp_path / "home")),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with HubClient(hub.url, hub.operator_token) as client:
            job = client.submit(spec)
            until(lambda: client.job(job)["state"] in ("done", "failed"), timeout_s=PATIENCE_S)
            view = client.job(job)
            assert view["state"] == "done", view
            (node,) = client.nodes()
            assert node["node"].startswith("box")
    finally:
        agent.terminate()
        said = agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 0, said
    upgraded = [line for line in nginx.requests if '"GET /atoll/ws HTTP/1.1" 101' in line]
    assert len(upgraded) >= 2  # the agent and its worker


def test_the_documentation_shows_the_file_that_is_tested() -> None:
    assert DOCUMENTED.read_text().strip() in (ROOT / "docs" / "operate" / "reaching.md").read_text()
