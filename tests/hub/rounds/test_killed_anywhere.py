"""The hub, killed with -9 at every instant at which it writes, while a whole small job runs.

What runs beside it are real links, as nodes and members use them: they reconnect and ask again by
themselves. Whatever the instant, the job ends, every answer that anybody got holds, and nothing has
happened twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec
import pytest

from atoll.errors import AuthError
from atoll.hub.storage.checkpoint_folders import newest_complete
from atoll.net.handshake import make_hello
from atoll.net.link import Link
from atoll.net.websocket import dial
from atoll.wire.messages import (
    Acked,
    CheckpointPart,
    CheckpointState,
    Done,
    Finished,
    Launch,
    Lease,
    LogLines,
    Message,
    Metrics,
    NodeInfo,
    Point,
    ProcessState,
    QueueAck,
    QueueClaim,
    QueueItems,
    QueuePut,
    QueuePutDone,
    Register,
    Registered,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
    unpack_command,
)
from atoll.wire.states import ProcessPhase
from bench.kit.ports import free_port
from tests.hub.lives import Lives
from tests.patience import PATIENCE_S
from tests.tiers import sampled

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="kill -9 and fork are of POSIX"),
]

M = TypeVar("M", bound=Message)

WAIT_S = PATIENCE_S
ROUNDS = 2
MEMBERS = ("w0", "w1")
SPEC = """
[job]
name = "toy"
nodes = 2
route = "direct"
[checkpoint]
keep = 5
"""


def retries() -> Iterator[float]:
    return itertools.repeat(0.02)


@dataclass
class Received:
    """Every answer that a member got."""

    plans: dict[int, list[RoundPlan]] = field(default_factory=dict)
    verdicts: dict[int, list[Verdict]] = field(default_factory=dict)
    put: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    published: bool = False


class Story:
    """One small job from its submission to its end, as its node and its members report it."""

    def __init__(self, url: str, ticket: str, token: str) -> None:
        self.received = Received()
        self.job = ""
        self._url, self._ticket = url, ticket
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            trust_env=False,
            timeout=PATIENCE_S,
        )

    async def tell(self) -> None:
        async with self._http:
            node, token = await self._join()
            machine = await self._link(node, token, NodeInfo("box", "Linux", "3", "t", slots=2))
            self.job = await self._submit()
            launches = await self._take_commands(machine, node)
            await asyncio.gather(*(self._be_member(launch) for launch in launches.values()))
            for launch in launches.values():
                body = ProcessState(
                    self.job, launch.member, ProcessPhase.EXITED,
                    exit_code=0, attempt=launch.attempt,
                )  # fmt: skip
                await _ask(machine, body, Done)
            await self._until_done()
            await machine.close()

    # ------------------------------------------------------------------------ over HTTP

    async def _again(self, call: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        """Repeat a request until the hub has answered it."""
        while True:
            try:
                answer = await call()
            except httpx.TransportError:
                await asyncio.sleep(0.05)
                continue
            assert answer.is_success, answer.text
            return answer

    async def _join(self) -> tuple[str, str]:
        body = {"secret": self._ticket.rpartition("/")[2], "name": "box"}
        answer = await self._again(lambda: self._http.post("/api/join", json=body))
        return answer.json()["node"], answer.json()["token"]

    async def _submit(self) -> str:
        """Submit as a person would: look whether it is there before trying once more."""
        while True:
            try:
                answer = await self._http.post("/api/jobs", json={"spec": SPEC})
                return str(answer.json()["job"])
            except httpx.TransportError:
                jobs = (await self._again(lambda: self._http.get("/api/jobs"))).json()
                if jobs:
                    return str(jobs[0]["job"])

    async def _put(self, name: str, content: bytes) -> str:
        await self._again(
            lambda: self._http.put(f"/api/jobs/{self.job}/files/{name}", content=content)
        )
        return hashlib.sha256(content).hexdigest()

    async def _until_done(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                view = await self._again(lambda: self._http.get(f"/api/jobs/{self.job}"))
                if view.json()["state"] == "done":
                    return
                await asyncio.sleep(0.05)

    # ---------------------------------------------------------------------- over links

    async def _link(self, session: str, token: str, info: NodeInfo | None = None) -> Link:
        hello = make_hello(session, token, info=info)
        link = Link(lambda: dial(self._url, timeout_s=PATIENCE_S), hello, retry=retries)
        await link.start(timeout_s=WAIT_S, patient=True)
        return link

    async def _take_commands(self, machine: Link, node: str) -> dict[str, Launch]:
        """Claim, obey and ack commands as an agent does, until both members were launched."""
        found: dict[str, Launch] = {}
        async with asyncio.timeout(WAIT_S):
            while len(found) < len(MEMBERS):
                claim = QueueClaim(f"node/{node}", 30.0, wait_s=5.0)
                for item in (await _ask(machine, claim, QueueItems)).items:
                    launch = unpack_command(item.payload)
                    assert isinstance(launch, Launch)
                    known = found.setdefault(launch.member, launch)
                    assert known == launch, "one launch for each member"
                    await _ask(machine, QueueAck(f"node/{node}", item.lease), Done)
                    state = ProcessState(self.job, launch.member, ProcessPhase.STARTING, attempt=1)
                    await _ask(machine, state, Done)
        return found

    async def _be_member(self, launch: Launch) -> None:
        me = launch.member
        link = await self._link(f"{self.job}/{me}", launch.token)
        other = next(name for name in MEMBERS if name != me)
        dials = [f"127.0.0.1:{launch.slot + 1}"]
        registered = await _ask(link, Register(dial=dials), Registered)
        assert registered.committed_round == 0
        for round_ in range(ROUNDS):
            await self._round(link, round_, me, other=other, slot=launch.slot)
            await self._report(link, me, round_)
        await self._checkpoint(link, me)
        await self._use_queue(link, me)
        # The hub may have ended the job, and with it this token, before it could answer.
        with contextlib.suppress(AuthError):
            await link.close(Finished(ok=True, result={"member": me}), timeout_s=WAIT_S)

    async def _round(self, link: Link, round_: int, me: str, *, other: str, slot: int) -> None:
        lease = Lease(slot, {"offset": 100 * (round_ + 1)})
        while True:
            join = RoundJoin(round_, f"base{round_}", [other], steps=10, busy_s=1.0, lease=lease)
            plan = await _ask(link, join, RoundPlan)
            self.received.plans.setdefault(plan.epoch, []).append(plan)
            assert plan.members == list(MEMBERS)
            vote = RoundVote(round_, plan.epoch, True, "same", list(MEMBERS), lease=lease)
            verdict = await _ask(link, vote, Verdict)
            self.received.verdicts.setdefault(plan.epoch, []).append(verdict)
            if verdict.committed:
                return

    async def _report(self, link: Link, me: str, round_: int) -> None:
        seq = round_ + 1
        point = Point(0.0, 10 * seq, round_, {"loss": 2.0})
        answer = await _ask(link, Metrics(link.incarnation, seq, [point]), Acked)
        assert answer.seq == seq
        answer = await _ask(link, LogLines(self.job, me, seq, [f"{me} line {seq}"]), Acked)
        assert answer.seq == seq

    async def _checkpoint(self, link: Link, me: str) -> None:
        names = [f"{me}.safetensors"] + ["shared.safetensors"] * (me == "w0")
        for name in names:
            content = f"{name} of round {ROUNDS}".encode() * 100
            path = f"checkpoints/round-{ROUNDS:06d}/{name}"
            digest = await self._put(path, content)
            part = CheckpointPart(ROUNDS, 20, name, digest, len(content))
            state = await _ask(link, part, CheckpointState)
            self.received.published = self.received.published or state.published

    async def _use_queue(self, link: Link, me: str) -> None:
        queue = f"{self.job}/{me}"
        for number in range(3):
            await _ask(link, QueuePut(queue, f"k{number}", b"x"), QueuePutDone)
            self.received.put.append(f"{me}/k{number}")
        items = (await _ask(link, QueueClaim(queue, 30.0, limit=2), QueueItems)).items
        assert [item.key for item in items] == ["k0", "k1"]
        await _ask(link, QueueAck(queue, items[0].lease), Done)
        self.received.done.append(f"{me}/k0")


async def _ask(link: Link, body: Message, kind: type[M]) -> M:
    answer = await link.request(body, timeout_s=WAIT_S)
    assert isinstance(answer, kind)
    return answer


def check(story: Story, folder: Path) -> None:
    """Compare what the hub has on its disk with every answer that was given."""
    connection = sqlite3.connect(folder / "data" / "hub.sqlite")
    try:
        check_rounds(story, connection)
        check_the_rest(story, connection)
    finally:
        connection.close()
    assert story.received.published
    job = folder / "jobs" / story.job
    assert newest_complete(job) == ROUNDS


def check_rounds(story: Story, connection: sqlite3.Connection) -> None:
    rows = connection.execute("SELECT epoch, round, plan, verdict FROM rounds").fetchall()
    plans = {epoch: msgspec.msgpack.decode(plan, type=RoundPlan) for epoch, _, plan, _ in rows}
    verdicts = {epoch: msgspec.msgpack.decode(v, type=Verdict) for epoch, _, _, v in rows}
    for epoch, got in story.received.plans.items():
        assert all(plan == plans[epoch] for plan in got)
    for epoch, said in story.received.verdicts.items():
        assert all(verdict == verdicts[epoch] for verdict in said)
    committed = sorted(v.round for v in verdicts.values() if v.committed)
    assert committed == list(range(ROUNDS)), "each round is committed once"
    ((record,),) = connection.execute("SELECT record FROM jobs").fetchall()
    job = msgspec.json.decode(record)
    assert job["committed_round"] == ROUNDS
    assert {m: job["members"][m]["result"] for m in MEMBERS} == {m: {"member": m} for m in MEMBERS}
    last = max((v for v in verdicts.values() if v.committed), key=lambda v: v.round)
    assert {m: (lease.slot, lease.cursor) for m, lease in last.leases.items()} == {
        name: (slot, {"offset": 100 * ROUNDS}) for slot, name in enumerate(MEMBERS)
    }


def check_the_rest(story: Story, connection: sqlite3.Connection) -> None:
    texts = sorted(text for (text,) in connection.execute("SELECT text FROM logs"))
    assert texts == [f"{m} line {n + 1}" for m in MEMBERS for n in range(ROUNDS)]
    (points,) = connection.execute("SELECT count(*) FROM points").fetchone()
    assert points == ROUNDS * len(MEMBERS)
    states = {
        f"{queue.rpartition('/')[2]}/{key}": state
        for queue, key, state in connection.execute("SELECT queue, key, state FROM queue_items")
        if not queue.startswith("node/")
    }
    assert sorted(states) == sorted(story.received.put)
    assert sorted(k for k, s in states.items() if s == "done") == sorted(story.received.done)
    launches = connection.execute(
        "SELECT count(*) FROM queue_items WHERE queue LIKE 'node/%' AND state = 'done'"
    ).fetchone()
    assert launches == (len(MEMBERS),)


def run(lives: Lives, folder: Path, kill_at: int) -> str:
    """Tell the story to a hub that is killed at an instant; return the name of the instant."""
    ready = lives.begin(folder, port=free_port(), kill_at=kill_at)
    story = Story(ready["url"], ready["ticket"], ready["token"])
    asyncio.run(asyncio.wait_for(story.tell(), 2 * WAIT_S))
    lives.end()
    check(story, folder)
    return lives.killed


SHARES = 11
"""Odd, so that each share meets all kinds of instants."""


@pytest.mark.parametrize(
    "share",
    sampled(
        range(SHARES),
        lambda share: share == 0,
        "tests/hub/rounds/test_killed_anywhere.py::test_hub_killed_at_any_instant_keeps_exactly_once",
    ),
)
def test_hub_killed_at_any_instant_keeps_exactly_once(tmp_path: Path, share: int) -> None:
    """Each share takes every eleventh instant; together they take all of them."""
    names: set[str] = set()
    with Lives() as lives:
        for kill_at in range(1 + share, 10_000, SHARES):
            name = run(lives, tmp_path / str(kill_at), kill_at)
            if not name:
                break
            names.add(name)
    assert kill_at > 60, "the story has fewer instants than it should have"
    assert names >= {"before a commit", "after a commit"}
