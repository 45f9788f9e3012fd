"""Through real proxies in processes of their own: what works, and who is named when it does not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll import config
from atoll.errors import ConfigError, HubUnreachable
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.endpoint import HubEndpoint
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.proxies import check_proxy, proxy_of, proxy_shown
from atoll.net.sync_link import connect
from atoll.net.websocket import dial
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import Beat, Done
from bench.kit.ports import free_port
from tests.e2e.conftest import TINY, until
from tests.patience import PATIENCE_S

KINDS = ("http", "socks5")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    with HubServer(HubOptions(data=folder / "hub", jobs=folder / "runs", reducers=False)) as made:
        yield made


class ProxyProcess:
    def __init__(self, kind: str, login: str = "") -> None:
        self.kind = kind
        self.popen = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("proxy_server.py")), kind, login],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        self.port = int(self.popen.stdout.readline())

    def url(self, login: str = "") -> str:
        return f"{self.kind}://{login + '@' if login else ''}127.0.0.1:{self.port}"

    def end(self) -> list[str]:
        """End it and return what it has said."""
        if self.popen.poll() is not None:
            return []
        self.popen.kill()
        return self.popen.communicate()[0].splitlines()


@pytest.fixture
def start() -> Iterator[Callable[..., ProxyProcess]]:
    started: list[ProxyProcess] = []

    def go(kind: str, login: str = "") -> ProxyProcess:
        started.append(ProxyProcess(kind, login))
        return started[-1]

    yield go
    for process in started:
        process.end()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("login", ["", "user:pass"])
@pytest.mark.every(3)
def test_sessions_files_and_tensors_go_through_the_proxy(
    hub: HubServer, start: Callable[..., ProxyProcess], kind: str, login: str
) -> None:
    proxy = start(kind, login)
    endpoint = HubEndpoint(proxy=proxy.url(login))
    with HubClient(hub.url, hub.operator_token, endpoint=endpoint) as client:
        assert client.hub()["version"]
        client.upload_bps(2 * 2**20)
        client.download_bps(2 * 2**20)
    with (
        connect(hub.url, make_hello("p/w0", hub.operator_token), endpoint=endpoint) as sender,
        connect(
            hub.url, make_hello("p/reducer", hub.operator_token), endpoint=endpoint
        ) as receiver,
        receiver.subscribe() as inbox,
    ):
        assert isinstance(sender.request(Beat(), timeout_s=PATIENCE_S), Done)
        deadline = time.monotonic() + PATIENCE_S
        sender.relay("p/reducer", (b"", bytes(CHUNK_BYTES)), deadline=deadline)
        inbox.receive(deadline=deadline)
    tunnels = [line for line in proxy.end() if line == f"tunnel 127.0.0.1:{hub.port}"]
    assert len(tunnels) >= 3


def reach(url: str, endpoint: HubEndpoint, *, by: str) -> None:
    if by == "websocket":
        asyncio.run(dial(url, endpoint=endpoint, timeout_s=PATIENCE_S))
    else:
        with HubClient(url, "t", endpoint=endpoint, timeout_s=PATIENCE_S) as client:
            client.hub()


# The HTTP library leaves the socket of a refused SOCKS connection to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")
@pytest.mark.parametrize("by", ["websocket", "rest"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.every(3)
def test_the_hop_that_fails_is_named(
    start: Callable[..., ProxyProcess], kind: str, by: str, scheme: str
) -> None:
    free, locked = start(kind), start(kind, "user:pass")
    nowhere = free_port()
    url = f"{scheme}://127.0.0.1:{nowhere}"
    with pytest.raises(HubUnreachable, match=f"the proxy at 127.0.0.1:{free.port} does not reach"):
        reach(url, HubEndpoint(proxy=free.url()), by=by)
    with pytest.raises(HubUnreachable, match=f"no proxy answers at 127.0.0.1:{nowhere}"):
        reach(url, HubEndpoint(proxy=f"{kind}://127.0.0.1:{nowhere}"), by=by)
    for login in ("", "user:wrong"):
        with pytest.raises(HubUnreachable, match=f"127.0.0.1:{locked.port} refuses to serve"):
            reach(url, HubEndpoint(proxy=locked.url(login)), by=by)


@pytest.mark.parametrize("by", ["websocket", "rest"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(3)
def test_a_stranger_behind_the_proxy_is_no_hub(
    start: Callable[..., ProxyProcess], kind: str, by: str
) -> None:
    proxy, stranger = start(kind), start("http", "user:pass")
    url = f"http://127.0.0.1:{stranger.port}"
    with pytest.raises(HubUnreachable):
        reach(url, HubEndpoint(proxy=proxy.url()), by=by)


@pytest.mark.parametrize(
    "url", ["proxy:3128", "ftp://proxy:21", "http://", "http://proxy:port", "socks4://proxy:1080"]
)
def test_what_is_no_proxy_is_refused_before_anything_is_dialled(url: str) -> None:
    with pytest.raises(ConfigError, match="socks5://"):
        check_proxy(url)


def test_passwords_of_proxies_are_never_shown() -> None:
    assert proxy_shown("http://me:secret@proxy:3128") == "http://me:***@proxy:3128"
    with pytest.raises(ConfigError) as caught:
        check_proxy("ftp://me:secret@proxy:3128")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, "https://hub.example:7700", ""),
        ({"HTTPS_PROXY": "http://p:1"}, "https://hub.example:7700", "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1"}, "http://hub.example:7700", ""),
        ({"http_proxy": "p:1"}, "http://hub.example:7700", "http://p:1"),
        ({"ALL_PROXY": "socks5://p:1"}, "https://hub.example", "socks5://p:1"),
        ({"ALL_PROXY": "http://p:1"}, "http://127.0.0.1:7700", ""),
        ({"ALL_PROXY": "http://p:1"}, "http://localhost:7700", ""),
        ({"ALL_PROXY": "http://p:1"}, "http://[::1]:7700", ""),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "*"}, "http://hub.example", ""),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "a,.example"}, "http://hub.example", ""),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "example"}, "http://hub.example", ""),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "ample"}, "http://hub.example", "http://p:1"),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "10.0.0.0/8"}, "http://10.2.3.4:7700", ""),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "10.0.0.0/8"}, "http://192.0.2.1", "http://p:1"),
        ({"ALL_PROXY": "http://p:1", "no_proxy": "10.2.3.4:7700"}, "http://10.2.3.4:7700", ""),
    ],
)
def test_proxies_of_the_environment(environment: dict[str, str], url: str, proxy: str) -> None:
    assert config.proxy_for(url, environment) == proxy


def measured(stats: dict[str, float]) -> dict[str, float]:
    """Return the figures once latency and speed are among them."""
    return stats if {"latency_ms", "up_bps", "down_bps"} <= set(stats) else {}


@pytest.mark.e2e
def test_node_and_workers_reach_the_hub_by_a_proxy(
    start: Callable[..., ProxyProcess], tmp_path: Path
) -> None:
    proxy = start("http", "user:pass")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 400)
    spec = TINY.format(text=text, model="gpt", steps=20, every=10).replace("nodes = 2", "nodes = 1")
    spec = spec.replace('route = "relay"', 'route = "auto"')
    with HubServer(HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs")) as hub:
        node = subprocess.Popen(
            [
                *(sys.executable, "-m", "atoll.cli", "join", hub.ticket, "--name", "box"),
                *("--via-proxy", proxy.url("user:pass"), "--upload-mbps", "100"),
            ],
            env={**os.environ, "ATOLL_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            with HubClient(hub.url, hub.operator_token) as client:
                stats = until(lambda: (n := client.nodes()) and measured(n[0]["stats"]))
                assert 0 < stats["up_bps"] <= 100e6  # what its owner allows
                job = client.submit(spec)
                until(lambda: client.job(job)["state"] in ("done", "failed"), timeout_s=PATIENCE_S)
                assert client.job(job)["state"] == "done", client.job(job)
            assert hub.hub is not None
            member = hub.hub.stores.jobs.get(job).members["w0"]
            assert member.dial == member.serves == []  # nothing passes beside the limit
        finally:
            node.terminate()
            said = node.communicate(timeout=PATIENCE_S)[0]
        tunnels = [line for line in proxy.end() if line == f"tunnel 127.0.0.1:{hub.port}"]
    assert "policy: at most 100 Mbit/s up" in said
    assert len(tunnels) >= 4  # joining, the agent, the worker, its checkpoints


@pytest.mark.parametrize("kind", KINDS)
def test_a_hub_with_tls_of_its_own_is_reached_through_a_proxy(
    start: Callable[..., ProxyProcess], tmp_path: Path, kind: str
) -> None:
    options = HubOptions(data=tmp_path / "h", jobs=tmp_path / "r", reducers=False, tls="on")
    with HubServer(options) as hub:
        endpoint = HubEndpoint(ca=hub.ca, proxy=start(kind, "user:pass").url("user:pass"))
        with HubClient(hub.url, hub.operator_token, endpoint=endpoint) as client:
            assert client.hub()["version"]
        with connect(hub.url, make_hello("p/w0", hub.operator_token), endpoint=endpoint) as link:
            assert isinstance(link.request(Beat(), timeout_s=PATIENCE_S), Done)


def test_named_proxy_beats_environment_beats_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = "https://hub.example:7700"
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_of("", hub=hub, kept="http://kept:1") == "http://kept:1"
    monkeypatch.setenv("HTTPS_PROXY", "http://env:1")
    assert proxy_of("", hub=hub, kept="http://kept:1") == "http://env:1"
    assert proxy_of("http://said:1", hub=hub, kept="http://kept:1") == "http://said:1"
    assert proxy_of("direct", hub=hub, kept="http://kept:1") == ""
