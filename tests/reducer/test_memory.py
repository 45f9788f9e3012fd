"""Memory of the reducer: one member's limit, the job's, and what the heartbeats say."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.errors import LimitReached
from atoll.net.dispatcher import Relayed
from atoll.net.sync_link import SyncLink
from atoll.reducer.memory import JOB as JOB_LIMIT
from atoll.reducer.memory import MEMBER, MemoryQuota
from atoll.reducer.parameter_server_endpoint import ParameterServerEndpoint
from atoll.reducer.server import Reducer
from atoll.wire.chunks import count_pieces
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.parameter_server_frames import (
    ServerFrameHead,
    frames,
    pack_frame,
    unpack_frame,
)
from atoll.wire.parameter_server_messages import (
    Answer,
    Ask,
    Attach,
    Load,
    Push,
    Setup,
    pack_message,
    unpack_answer,
)
from tests.reducer.test_bad_input import BAD, ELEMENTS, HEALTHY, JOB, Bench, Desk, plan_of

SIZE = 4 * ELEMENTS


class Limited(Bench):
    """A reducer with limits."""

    def __init__(self, **limits: int) -> None:
        super().__init__(plan_of())
        self.close()
        self.limits = limits
        self.reducer = Reducer(cast(SyncLink, self.endpoint), job=JOB, limits=lambda: self.limits)
        self.reducer._handle(self.plan)


@pytest.fixture
def benches() -> Iterator[list[Limited]]:
    made: list[Limited] = []
    yield made
    for bench in made:
        bench.close()


def vector(value: float, elements: int = ELEMENTS) -> torch.Tensor:
    return torch.full((elements,), value)


def test_a_member_that_sends_too_much_is_refused_alone(benches: list[Limited]) -> None:
    bench = Limited(**{MEMBER: SIZE, JOB_LIMIT: 100 * SIZE})
    benches.append(bench)
    bench.contribute(BAD, vector(1.0, ELEMENTS + 1))
    (said,) = bench.refused(BAD)
    for part in (f"of {BAD}", f"{SIZE + 4} more", f"at most {SIZE} bytes", MEMBER):
        assert part in said
    for member in HEALTHY:
        bench.contribute(member, vector(2.0))
    found = bench.result(HEALTHY[0])
    assert found is not None
    assert torch.equal(found[0], vector(2.0))
    figures = bench.reducer.figures()
    assert figures[f"refused/{BAD}"] == 1
    assert figures["refused"] == 0
    assert figures[f"held_bytes/{HEALTHY[0]}"] == SIZE


def test_all_members_together_keep_to_the_jobs_limit(benches: list[Limited]) -> None:
    bench = Limited(**{MEMBER: 100 * SIZE, JOB_LIMIT: 2 * SIZE})
    benches.append(bench)
    for member in (*HEALTHY, BAD):
        bench.contribute(member, vector(1.0))
    refused = [name for name in (*HEALTHY, BAD) if bench.refused(name)]
    assert refused == [*HEALTHY, BAD][2:]
    assert "of this job's members" in bench.refused(BAD)[0]
    assert bench.reducer.figures()["held_bytes"] <= 2 * SIZE


def test_zero_and_absent_mean_no_limit(benches: list[Limited]) -> None:
    for limits in ({}, {MEMBER: 0, JOB_LIMIT: 0}):
        bench = Limited(**limits)
        benches.append(bench)
        for member in (*HEALTHY, BAD):
            bench.contribute(member, vector(1.0))
        assert bench.result(BAD) is not None


def test_a_limit_that_is_lowered_meanwhile_keeps_what_has_begun(benches: list[Limited]) -> None:
    bench = Limited(**{MEMBER: SIZE})
    benches.append(bench)
    bench.contribute(HEALTHY[0], vector(1.0))
    bench.limits = {MEMBER: 1}
    bench.contribute(HEALTHY[0], vector(1.0))  # the same pieces again
    assert not bench.refused(HEALTHY[0])


class ServerLink(Desk):
    """Keeps the answers of a parameter server, by member."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, list[Answer]] = {}

    def relay_later(self, to: str, parts: Iterator[Any], *, deadline: float) -> Future[int]:
        for head, piece in parts:
            frame_head, _ = unpack_frame(memoryview(bytes(head) + bytes(piece)))
            if frame_head.index == 0:
                member = to.rpartition("/")[2]
                self.answers.setdefault(member, []).append(unpack_answer(frame_head.body))
        done: Future[int] = Future()
        done.set_result(0)
        return done


class Servers:
    """A parameter server whose memory is limited."""

    def __init__(self, **limits: int) -> None:
        self.link, self.limits = ServerLink(), limits
        memory = MemoryQuota(lambda: self.limits, held=lambda: self.endpoint.held())
        self.memory = memory
        self.endpoint = ParameterServerEndpoint(
            cast(SyncLink, self.link), job=JOB, memory=memory
        )  # fmt: skip
        self._calls = 0

    def ask(self, member: str, ask: Ask, elements: int) -> Answer | None:
        """Send an ask with that many elements; return its answer, if there is one by now."""
        self._calls += 1
        data = make_codec("fp32").encode(torch.ones(elements)).data if elements else b""
        before = len(self.link.answers.get(member, []))
        for head, piece in frames("ask", self._calls, pack_message(ask), data):
            payload = memoryview(bytes(head) + bytes(piece))
            self.endpoint._receive(Relayed(f"{JOB}/{member}", payload))
        answers = self.link.answers.get(member, [])
        return answers[-1] if len(answers) > before else None


def test_a_push_that_does_not_fit_is_refused_and_others_go_on() -> None:
    servers, members = Servers(), ["w0", "w1"]
    setup = Setup(parameters=8, mode="synchronous")
    for member in members:
        servers.ask(member, Attach(1, members, want=False), 0)
    load = Load(1, members, setup, 8)
    assert servers.ask("w0", load, 8) is not None
    assert servers.endpoint.held() == {"": 32}
    servers.limits = {MEMBER: 32, JOB_LIMIT: 0}
    assert servers.ask("w1", Push(1, 0, 0, "fp32", [8]), 8) is None  # it waits for w0's
    assert servers.endpoint.held() == {"": 32, "w1": 32}
    assert servers.memory.figures()["held_bytes"] == 64
    servers.limits = {MEMBER: 32, JOB_LIMIT: 64}
    refused = servers.ask("w0", Push(1, 0, 0, "fp32", [8]), 8)
    assert refused is not None
    assert refused.kind == "refused"
    assert refused.error["kind"] == "LimitReached"
    assert "this job's members" in refused.error["what"]
    servers.limits = {MEMBER: 31, JOB_LIMIT: 0}
    refused = servers.ask("w0", Push(1, 0, 0, "fp32", [8]), 8)
    assert refused is not None
    assert "of w0" in refused.error["what"]
    servers.limits = {}
    answer = servers.ask("w0", Push(1, 0, 0, "fp32", [8]), 8)
    assert answer is not None
    assert answer.accepted
    assert answer.version == 1
    assert servers.link.answers["w1"][-1].version == 1
    assert servers.memory.figures() == {
        "held_bytes": 32.0, "refused": 1.0, "refused/w0": 1.0,
    }  # fmt: skip


def test_a_size_that_is_only_announced_takes_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    servers, total, elements = Servers(), 2**30, 2**28
    body = pack_message(Push(1, 0, 0, "fp32", [elements]))
    head = ServerFrameHead("ask", 1, 0, count_pieces(total), total, body)
    frame, _ = pack_frame(head)
    before = resident_bytes()
    servers.endpoint._receive(Relayed(f"{JOB}/w0", memoryview(frame + bytes(CHUNK_BYTES))))
    assert servers.endpoint.held() == {"w0": total}
    assert resident_bytes() - before < total // 4


def test_names_of_no_members_are_not_remembered() -> None:
    servers = Servers()
    for name in ("x0", "w", "w1.1", "w123456", "w" + "9" * 5_000):
        assert servers.ask("w0", Attach(1, ["w0", name]), 0) is None
    assert servers.endpoint.server.expected == []
    servers.endpoint._tick(0.0)
    assert set(servers.endpoint._clients) == {"w0"}


def test_figures_can_be_read_while_others_are_refused() -> None:
    memory = MemoryQuota(lambda: {MEMBER: 1}, held=Counter[str])
    usual, done = sys.getswitchinterval(), threading.Event()

    def refuse() -> None:
        for number in range(30_000):
            with contextlib.suppress(LimitReached):
                memory.check(f"w{number}", 2)
        done.set()

    thread = threading.Thread(target=refuse)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while not done.is_set():
            memory.figures()
    finally:
        thread.join()
        sys.setswitchinterval(usual)
    assert memory.figures()["refused/w0"] == 1


def test_models_of_regions_count_before_a_server_makes_them() -> None:
    servers, setup = Servers(), Setup(parameters=8, regions=[1, 1])
    servers.ask("w0", Attach(1, ["w0"], want=False), 0)
    servers.limits = {MEMBER: 0, JOB_LIMIT: 5 * 32 - 1}
    refused = servers.ask("w0", Load(1, ["w0"], setup, 8), 8)
    assert refused is not None
    assert refused.error["kind"] == "LimitReached"
    servers.limits = {MEMBER: 0, JOB_LIMIT: 5 * 32}
    loaded = servers.ask("w0", Load(1, ["w0"], setup, 8), 8)
    assert loaded is not None
    assert loaded.kind == "theta"
    assert servers.endpoint.held() == {"": 5 * 32}, "the vector, and two of each region"


def test_absurd_numbers_of_a_member_do_not_end_a_server() -> None:
    servers, members = Servers(), ["w0", "w1"]
    for member in members:
        servers.ask(member, Attach(1, members, want=False), 0)
    load = Load(1, members, Setup(parameters=8), 8, version=2**64 - 1)
    assert servers.ask("w0", load, 8) is not None
    assert servers.ask("w1", Push(1, 0, 0, "fp32", [8]), 8) is None  # no message holds 2**64
    for call, count in ((4, 2**62), (4, 10**9), (5, -1)):
        head, piece = pack_frame(ServerFrameHead("look", call, count=count))
        payload = memoryview(bytes(head) + bytes(piece))
        servers.endpoint._receive(Relayed(f"{JOB}/w1", payload))
    answer = servers.ask("w0", Push(0, 0, 0, "fp32", [8]), 8)
    assert answer is not None
    assert answer.kind == "unknown"
