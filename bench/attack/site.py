"""What is attacked: a hub, nodes and a job as processes, and the ways in from outside.

Only the public protocol is used: HTTP, WebSocket, files that other users could read, and command
lines. An attacker has what the role of the attack has: nothing, a ticket, a token, or a node.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from websockets.sync.client import ClientConnection, connect

from atoll.net.endpoint import HubEndpoint, parse_ticket
from atoll.net.http.client import HubClient
from atoll.node.identity.identity import Identity
from atoll.node.identity.join import enter_cluster
from bench.attack.session import INFO, WAIT_S, Session, read_to_end, until
from bench.kit.cluster import Cluster

SPEC = '[job]\nname = "toy"\nnodes = 1\n[train]\nsteps = 100\n'

LENT = "lent"
"""The machine whose owner allows jobs of Atoll's own programs only: `trainer` and `rl`."""

EVIL, HONEST = "evil", ("n0", "n1", "n2")
"""Machines of the job that trains all the time."""

MODEL = {"layers": 1, "width": 16, "heads": 2, "context": 16}

TRAINER = """
[job]
name = "{name}"
nodes = {nodes}
on = {on}
route = "relay"
[model]
layers = 1
width = 16
heads = 2
context = 16
[data]
corpus = "files:{text}"
[train]
steps = {steps}
batch = 4
eval_tokens = 512
[strategy]
preset = "diloco"
codec = "fp32"
every = 10
shared_steps = 0
[checkpoint]
every = 10
"""


def trainer_job(
    site: Site, name: str, *, on: str | list[str], steps: int = 5, nodes: str = "1"
) -> str:
    """Return a small job for some machines."""
    text = site.folder / "text.txt"
    if not text.exists():
        text.write_text(
            "the sea around an atoll is warm and blue. " * 2_000, encoding="utf-8", newline="\n"
        )
    names = json.dumps([on] if isinstance(on, str) else on)
    return TRAINER.format(name=name, nodes=nodes, on=names, text=text, steps=steps)


class Site:
    """A cluster under attack, and the job that runs in it meanwhile."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        """Attack this cluster; `folder` is the attacker's own."""
        self.cluster, self.folder = cluster, folder
        self.job = ""
        """The job that runs on honest nodes; empty: there is none."""
        self.evil: object | None = None
        """What the hostile machine does in that job."""
        self._made = 0
        folder.mkdir(parents=True, exist_ok=True)

    def lend(self) -> None:
        """Start the machine whose owner allows no foreign code."""
        home = self.cluster.folder / "nodes" / LENT
        home.mkdir(parents=True)
        (home / "node.toml").write_text(
            'kinds = ["trainer", "rl"]\n', encoding="utf-8", newline="\n"
        )
        self.cluster.start_node(LENT)
        self.cluster.wait_for_nodes(1)

    def train(self) -> None:
        """Start the job that trains all the time, and its honest machines."""
        for name in HONEST:
            self.cluster.start_node(name)
        self.cluster.wait_for_nodes(1 + len(HONEST))
        spec = trainer_job(
            self, "live", on=[*HONEST, EVIL], steps=10_000_000, nodes="{min = 2, max = 4}"
        )
        self.job = self.operator.submit(spec)
        until(lambda: self.committed() > 1, "the job commits rounds")

    def committed(self) -> int:
        """Return how many rounds the job has committed."""
        return int(self.operator.job(self.job)["committed_round"])

    def await_rounds(self, count: int) -> int:
        """Wait until the job commits more rounds; return how many it has by then."""
        goal = self.committed() + count
        until(lambda: self.committed() >= goal, f"{count} more rounds", wait_s=2 * WAIT_S)
        return goal

    def last_event(self) -> int:
        """Return the number of the job's newest event."""
        last, found = 0, self.operator.events(self.job)
        while found["events"]:
            last = int(found["last"])
            found = self.operator.events(self.job, after=last)
        return last

    def reducer_mb(self) -> float:
        """Return the resident memory of the job's reducers."""
        return sum(p.memory_info().rss for p in self.cluster.reducers()) / 1e6

    def end(self) -> str:
        """Stop the job; return what is wrong with its end, or an empty text."""
        self.operator.stop(self.job, grace_s=60.0)

        def ended() -> dict[str, Any] | None:
            view = self.operator.job(self.job)
            return view if view["ended"] else None

        view = until(ended, "the job ends")
        results = {m["member"]: m["result"] for m in view["members"] if m["result"]}
        digests = {str(result.get("digest")) for result in results.values()}
        if len(digests) != 1 or len(results) < len(HONEST):
            return f"{view['state']}: {len(results)} results with {len(digests)} digests"
        return ""

    # -------------------------------------------------------------------------------- accounts

    @property
    def operator(self) -> HubClient:
        """A client of the operator, on the hub's machine."""
        return self.cluster.client

    @property
    def secure(self) -> bool:
        """Whether the hub speaks TLS."""
        return bool(self.cluster.ca)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port by which strangers reach the hub.

        Others use loopback, which has no limits per address: an attack slows its own address only.
        """
        ticket = parse_ticket(self.cluster.ticket)
        return ticket.host, ticket.port

    @property
    def url(self) -> str:
        """The hub's URL for strangers."""
        return parse_ticket(self.cluster.ticket).url

    def token(self, role: str) -> str:
        """Return the token of a fresh login."""
        ticket = parse_ticket(self.operator.create_ticket(role=role, uses=1))
        with self.client() as client:
            return client.log_in(ticket.secret, name=self._name(role)).token

    def client(self, token: str = "") -> HubClient:
        """Return a client with some token."""
        return HubClient(self.cluster.url, token, endpoint=HubEndpoint(ca=self.cluster.ca))

    def node(self, *, ticket: str = "", name: str = "") -> Identity:
        """Join as a machine; return what it got."""
        name = name or self._name("mallory")
        near = replace(parse_ticket(ticket or self.cluster.ticket), host="127.0.0.1")
        return enter_cluster(near, home=self.folder / self._name(name), name=name, info=INFO)

    def node_state(self, node: str) -> str:
        """Return the state of a machine as the hub sees it; empty: it does not know it."""
        return next((one["state"] for one in self.operator.nodes() if one["node"] == node), "")

    def _name(self, front: str) -> str:
        self._made += 1
        return f"{front}{self._made}"

    # ------------------------------------------------------------------------------------ ways

    def web(self, token: str = "", *, me: Identity | None = None, **more: Any) -> httpx.Client:
        """Return a plain HTTP client, with a token and the certificate of a node."""
        headers = {**more.pop("headers", {})}
        if token:
            headers["authorization"] = f"Bearer {token}"
        context = self.context(me)
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=WAIT_S, trust_env=False,
            verify=True if context is None else context, **more,
        )  # fmt: skip

    def context(self, me: Identity | None = None) -> ssl.SSLContext | None:
        """Return the TLS settings of a client that trusts this hub; None without TLS."""
        if not self.secure:
            return None
        context = ssl.create_default_context(cafile=self.cluster.ca)
        context.check_hostname = False
        if me is not None and me.certificate:
            context.load_cert_chain(me.certificate, me.key)
        return context

    @contextlib.contextmanager
    def raw(self, *, tls: bool | None = None) -> Iterator[socket.socket]:
        """Open a TCP connection to the hub, with TLS as it speaks unless `tls` is given."""
        opened: socket.socket = socket.create_connection(self.address, timeout=WAIT_S)
        with contextlib.ExitStack() as stack:
            stack.enter_context(opened)
            context = self.context()
            if context is not None and tls is not False:
                opened = stack.enter_context(context.wrap_socket(opened))
            yield opened

    def socket(self, *, me: Identity | None = None, url: str = "", **more: Any) -> ClientConnection:
        """Open a WebSocket to the hub, or to what stands at `url`; nothing is sent yet."""
        opened: ClientConnection = connect(
            (url or self.url).replace("http", "ws", 1) + "/ws", ssl=self.context(me), proxy=None,
            compression=None, ping_interval=None, max_size=None, close_timeout=0.5, **more,
        )  # fmt: skip
        return opened

    @contextlib.contextmanager
    def session(
        self, address: str, token: str, *, me: Identity | None = None, incarnation: str = "m1"
    ) -> Iterator[Session]:
        """Open a session and say Hello."""
        with self.socket(me=me) as opened:
            yield Session(opened, address, token, incarnation=incarnation)

    def request(self, head: bytes, *, wait_s: float = WAIT_S) -> bytes:
        """Send bytes as they are and return everything until the hub closes."""
        with self.raw() as opened:
            with contextlib.suppress(OSError):
                opened.sendall(head)
            return read_to_end(opened, wait_s=wait_s)

    # ------------------------------------------------------------------------ how the hub fares

    def rss_mb(self) -> float:
        """Return the hub's resident memory, as it says itself."""
        return float(self.operator.hub()["rss_bytes"]) / 1e6

    def healthy_s(self) -> float:
        """Return after how many seconds the hub answers."""
        began = time.monotonic()
        with self.client() as client:
            client.health()
        return time.monotonic() - began

    def hub_process(self) -> psutil.Process:
        """Return the hub, for an attacker on its machine."""
        assert self.cluster.hub is not None
        return psutil.Process(self.cluster.hub.pid)


def own_address() -> str:
    """Return an address of this machine that is not loopback, or an empty text."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    return ""
