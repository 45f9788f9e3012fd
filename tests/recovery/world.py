"""A real hub with a job, donors in this process and in others, and a member without the state."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.checkpoint.format.part import Part
from atoll.clock import RealClock
from atoll.ids import session_id
from atoll.net.handshake import make_hello
from atoll.net.sync_link import SyncLink, connect
from atoll.recovery import Recipient, Recovered, recover
from atoll.recovery.http_server import Answerer, HttpStateServer
from atoll.recovery.relay_server import RelayStateServer
from atoll.recovery.server import StateServer
from atoll.recovery.snapshot_cache import SnapshotCache, StateOf
from atoll.state_lock import StateLock
from atoll.wire.limits import DEAD_AFTER_S
from atoll.wire.messages import Event, Recover, Source, Sources
from tests import warm
from tests.group.hub_world import NodeInName, start_hub
from tests.group.proxy import Proxy
from tests.patience import PATIENCE_S
from tests.recovery.donor import Given, be_a_donor
from tests.recovery.model import LOCAL as LOCAL
from tests.recovery.model import Model as Model


def assert_same(found: Part | None, expected: Part) -> None:
    assert found is not None
    assert found.metadata == expected.metadata
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


class SpoiltDonor:
    """A `StateServer` whose answers go through a function first."""

    def __init__(
        self, job: str, spoil: Callable[[Answerer], Answerer], *, link: SyncLink, direct: bool
    ) -> None:
        self.cache = SnapshotCache(job=job, key="k")
        answer = spoil(self.cache.answer)
        self.relay_server = RelayStateServer(answer, link=link)
        self.http_server = HttpStateServer(answer, address=LOCAL, keys=("k",)) if direct else None
        self.dial = [f"{LOCAL}:{self.http_server.port}"] if self.http_server is not None else []
        self.offer = self.cache.offer

    def close(self) -> None:
        self.cache.close()
        self.relay_server.close()
        if self.http_server is not None:
            self.http_server.close()


class World:
    """One job. `recover` fetches as its last member."""

    def __init__(self, node: NodeInName, *, nodes: int) -> None:
        self.node, self.hub, self.nodes = node, node.hub, nodes
        self.job, self.tokens = self._submit(nodes)
        self.me = f"w{nodes - 1}"
        self.events: list[Event] = []
        self.requests: list[list[str]] = []
        self.links: dict[str, SyncLink] = {}
        self.donors: dict[str, Any] = {}
        self.dials: dict[str, list[str]] = {}
        self.models: dict[str, Model] = {}
        self.state_locks: dict[str, StateLock] = {}
        self.processes: dict[str, tuple[Any, Connection]] = {}
        self.proxies: list[Proxy] = []
        self.round = 3
        self.gone: set[str] = set()
        self.progress: list[int] = []

    def _submit(self, nodes: int) -> tuple[str, dict[str, str]]:
        job = self.node.submit(nodes=nodes, route="relay")
        while len(self.node.tokens.get(job, {})) < nodes + 1:
            self.node.take_commands()
        return job, self.node.tokens[job]

    def stranger(self) -> SyncLink:
        """Return the session of a member of another job."""
        job, tokens = self._submit(2)
        return connect(self.hub.url, make_hello(session_id(job, "w0"), tokens["w0"]))

    def link(self, member: str, *, proxied: bool = False) -> SyncLink:
        url = self.hub.url
        if proxied:
            self.proxies.append(Proxy(self.hub.port))
            url = self.proxies[-1].url
        link = connect(url, make_hello(session_id(self.job, member), self.tokens[member]))
        self.links[member] = link
        return link

    def donor(
        self,
        member: str,
        *,
        direct: bool = True,
        spoil: Callable[[Answerer], Answerer] | None = None,
        proxied: bool = False,
        job: str = "",
        **model: int,
    ) -> Model:
        """Start a donor in this process."""
        link, job = self.link(member, proxied=proxied), job or self.job
        server: Any
        if spoil is not None:
            server = SpoiltDonor(job, spoil, link=link, direct=direct)
        else:
            server = StateServer(
                job=job, token=self.tokens[member], address=LOCAL if direct else "", link=link
            )
        state = self.models[member] = Model(member, **{"round_": self.round, **model})
        state_lock = self.state_locks[member] = StateLock()
        server.offer(state, still=state_lock.still)
        self.donors[member], self.dials[member] = server, server.dial
        return state

    def offer(self, member: str, state: StateOf) -> None:
        """Start a donor that gives a state of its own kind."""
        self.donor(member, numel=1)
        self.donors[member].offer(state, still=self.state_locks[member].still)

    def processes_of(self, *members: str, direct: bool = True, **model: int) -> list[Model]:
        """Start donors that are processes of their own."""
        options = {"round_": self.round, **model}
        context = warm.processes()
        for member in members:
            near, far = context.Pipe()
            given = Given(
                self.hub.url, self.job, member, self.tokens[member], direct=direct, model=options
            )
            process = context.Process(target=be_a_donor, args=(given, far), daemon=True)
            process.start()
            far.close()
            self.processes[member] = (process, near)
        for member in members:
            self.dials[member] = self.processes[member][1].recv()
            self.models[member] = Model(member, **options)
        return [self.models[member] for member in members]

    def kill(self, member: str, signal_: int = signal.SIGKILL) -> None:
        process, _ = self.processes[member]
        os.kill(process.pid, signal_)
        if signal_ == signal.SIGKILL:
            process.join(PATIENCE_S)
            self.gone.add(member)

    def ask(self, body: Recover) -> Sources:
        """Answer as the hub does."""
        self.requests.append(body.failed)
        left = [member for member in self.dials if member not in self.gone]
        peers = [member for member in left if member not in body.failed] or left
        return Sources(self.round, [Source(m, self.dials[m]) for m in peers], checkpoint_round=2)

    def recover(
        self,
        *,
        at: Sequence[tuple[float, Callable[[], object]]] = (),
        timeout_s: float = PATIENCE_S,
        proxied: bool = False,
        stop: Callable[[], bool] = lambda: False,
        distrusted: Sequence[str] = (),
        older: Recovered | None = None,
    ) -> Recovered:
        """Fetch as the last member.

        Args:
            at: Things to do once a share of all bytes is here.
            timeout_s: Longest time for it.
            proxied: Whether the own link goes through a proxy.
            stop: Asked again and again; True: give up.
            distrusted: Members to ask only if no other is left.
            older: What was fetched before.
        """
        link = self.links.get(self.me) or self.link(self.me, proxied=proxied)
        todo = sorted(at, key=lambda item: item[0])
        lock = threading.Lock()

        def progress(done: int, total: int) -> None:
            with lock:
                self.progress.append(done)
                due = [
                    todo.pop(0)[1] for _ in range(sum(done >= share * total for share, _ in todo))
                ]
            for action in due:
                action()

        return recover(
            Recipient(link, self.job, self.me, self.events.append, stop=stop, progress=progress),
            ask=self.ask, deadline=RealClock().monotonic() + timeout_s, distrusted=distrusted,
            older=older,
        )  # fmt: skip

    def events_of(self, kind: str) -> dict[str, str]:
        """Return source -> reason of the events of a kind."""
        return {e.fields["source"]: e.fields["reason"] for e in self.events if e.kind == kind}

    def close(self) -> None:
        for process, pipe in self.processes.values():
            process.kill()
            process.join(PATIENCE_S)
            pipe.close()
        for server in self.donors.values():
            server.close()
        for link in self.links.values():
            link.close()
        for proxy in self.proxies:
            proxy.close()


def wait_until(happened: Callable[[], object], *, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def deadline_after(happened: Callable[[], object]) -> Iterator[None]:
    """Let the deadline of a recovery inside pass once something has happened, and not before."""

    class Clock(RealClock):
        def monotonic(self) -> float:
            return super().monotonic() + (PATIENCE_S if happened() else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("fetch", "recover"):
            patch.setattr(import_module(f"atoll.recovery.{module}"), "RealClock", Clock)
        yield


@contextmanager
def threads_end() -> Any:
    """Check that no thread of a recovery outlives the block."""
    yield
    names = ("state-of-",)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(names)])


@contextmanager
def node_of_a_hub(
    folder: Path, *, reconnect_grace_s: float = PATIENCE_S, dead_after_s: float = DEAD_AFTER_S
) -> Iterator[NodeInName]:
    """Run a hub, which waits for members whose connection is lost, and a node in name only."""
    with start_hub(folder, reconnect_grace_s=reconnect_grace_s, dead_after_s=dead_after_s) as hub:
        node = NodeInName(hub)
        yield node
        node.link.close()


@contextmanager
def members_on(node: NodeInName, *, nodes: int) -> Iterator[World]:
    """Make a job of so many members; its threads MUST have ended at the end."""
    world = World(node, nodes=nodes)
    try:
        with threads_end():
            yield world
    finally:
        world.close()
