"""A small cluster made of real sessions: machines with figures, and jobs in several states."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from types import TracebackType
from typing import Any, Self
from unittest import mock

import httpx

from atoll.hub.server import HubServer
from atoll.rounds import timing
from atoll.wire.messages import (
    Beat,
    Event,
    LogLines,
    MemberStats,
    Metrics,
    NodeInfo,
    Offer,
    Point,
    Register,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
)
from tests.hub.peer import Peer
from tests.patience import PATIENCE_S

SPEC = """
[job]
name = "{name}"
nodes = {nodes}
min_nodes = {least}
[train]
steps = 400
"""

MACHINES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "kitchen-1": (
        {"cores": 8, "memory_bytes": 16 * 10**9, "matmul_gflops": 180.0, "gpu": "",
         "computes_on": "processor",
         "idle": "GeForce RTX 3060 is idle: torch 2.13.0+cpu is built without support for it; "
                 "pip install torch for CUDA"},
        {"cpu_percent": 71.0, "memory_percent": 42.0, "disk_free_bytes": 212e9, "latency_ms": 4.2,
         "up_bps": 94e6, "down_bps": 310e6},
    ),
    "attic-gpu": (
        {"cores": 16, "memory_bytes": 64 * 10**9, "matmul_gflops": 300.0,
         "gpu": "GeForce RTX 3090", "gpus": 1,
         "gpu_memory_bytes": 24 * 10**9, "computes_on": "GeForce RTX 3090 (24 GB)"},
        {"cpu_percent": 22.0, "memory_percent": 31.0, "gpu_percent": 96.0,
         "gpu_memory_used_bytes": 9e9, "disk_free_bytes": 4e9,
         "latency_ms": 1.1, "up_bps": 930e6, "down_bps": 940e6},
    ),
    "maria-laptop": (
        {"cores": 12, "memory_bytes": 32 * 10**9, "matmul_gflops": 250.0, "gpu": "",
         "offer": Offer(cores=6, upload_bps=20e6, kinds=["trainer", "container"],
                        text=["at most 6 of 12 cores", "quiet hours 22:00 to 07:00",
                              "pauses on battery"],
                        labels=["laptop"])},
        {"cpu_percent": 48.0, "memory_percent": 77.0, "disk_free_bytes": 88e9, "latency_ms": 38.0,
         "up_bps": 18e6, "down_bps": 60e6, "battery_percent": 81.0, "on_battery": 0.0},
    ),
    "jonas-laptop": (
        {"cores": 8, "memory_bytes": 8 * 10**9, "matmul_gflops": 90.0, "gpu": "", "atoll": "0.0.9",
         "offer": Offer(paused="on battery", text=["pauses on battery"])},
        {"cpu_percent": 9.0, "memory_percent": 91.0, "disk_free_bytes": 20e9, "latency_ms": 61.0,
         "up_bps": 6e6, "down_bps": 30e6, "battery_percent": 17.0, "on_battery": 1.0},
    ),
}  # fmt: skip


class Scene:
    """The cluster; leaving it closes all its sessions."""

    def __init__(self, hub: HubServer, *, slots: int = 4) -> None:
        """`slots` is how many processes each machine takes."""
        self.hub, self.slots = hub, slots
        self.http = httpx.Client(
            base_url=hub.url,
            headers={"authorization": f"Bearer {hub.operator_token}"},
            trust_env=False,
            timeout=PATIENCE_S,
        )
        self.nodes: dict[str, Peer] = {}
        self._open = contextlib.ExitStack()
        self._seq: dict[str, int] = {}
        self._peers: list[Peer] = []
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        # Members join and vote one after the other: no round is to go on, or to end, meanwhile.
        for limit in ("MIN_GRACE_S", "MIN_TIMEOUT_S"):
            self._open.enter_context(mock.patch.object(timing, limit, PATIENCE_S))
        self._open.enter_context(self.http)
        self._heart.start()
        for name in MACHINES:
            self.join(name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._heart.join()
        self._open.close()

    def _beat(self) -> None:
        """Keep every session alive, as the links of real processes do."""
        while not self._over.wait(2.0):
            for peer in list(self._peers):
                with contextlib.suppress(Exception):  # a test may have cut it
                    stats = MACHINES.get(peer.session, ({}, {}))[1]
                    peer.tell(Beat(stats, time.time()))

    def connect(self, session: str, *, info: NodeInfo | None = None, token: str = "") -> Peer:
        """Open a session that lives as long as the scene."""
        peer = self._open.enter_context(Peer(self.hub, session, info=info, token=token))
        self._peers.append(peer)
        return peer

    def join(self, name: str) -> Peer:
        """Connect a machine and let it tell its figures."""
        about, stats = MACHINES[name]
        version = self.http.get("/api/hub").json()["version"]
        info = NodeInfo(
            hostname=name,
            system="Linux",
            python="3.11",
            slots=self.slots,
            **{"atoll": version, **about},
        )
        body = {"secret": self.hub.ticket.rpartition("/")[2], "name": name}
        token = self.http.post("/api/join", json=body).json()["token"]
        peer = self.connect(name, info=info, token=token)
        peer.tell(Beat(stats, time.time()))
        self.nodes[name] = peer
        return peer

    def token(self, role: str) -> str:
        """Return a login of this role."""
        made = self.http.post("/api/tickets", json={"role": role, "uses": 1})
        secret = made.json()["ticket"].rpartition("/")[2]
        answer = self.http.post("/api/login", json={"secret": secret, "name": f"test-{role}"})
        return str(answer.json()["token"])

    def submit(self, name: str, *, nodes: int = 2, least: int = 1, batch: str = "") -> str:
        """Submit a job and wait until it is placed, if it can be."""
        body = {"spec": SPEC.format(name=name, nodes=nodes, least=least)} | (
            {"batch": batch} if batch else {}
        )
        answer = self.http.post("/api/jobs", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["job"])

    def view(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/api/jobs/{job}").json()
        return found

    def placed(self, job: str) -> list[dict[str, Any]]:
        """Return the members of a job once it has places."""
        deadline = time.monotonic() + PATIENCE_S
        while not (members := self.view(job)["members"]):
            assert time.monotonic() < deadline, "the job was not placed"
            time.sleep(0.02)
        return list(members)

    def wait_for_alarm(self, kind: str) -> dict[str, Any]:
        """Return an open alarm of a kind once there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for alarm in self.http.get("/api/alarms").json():
                if alarm["kind"] == kind:
                    return dict(alarm)
            assert time.monotonic() < deadline, f"there is no alarm {kind}"
            time.sleep(0.05)

    def start(self, job: str) -> list[Peer]:
        """Connect the processes of a job."""
        members = self.placed(job)
        if len(members) > 1:  # they meet through the hub, where the reducer sums
            self.connect(f"{job}/reducer")
        peers = []
        for member in members:
            peer = self.connect(f"{job}/{member['member']}")
            peer.request(Register())
            peers.append(peer)
        return peers

    def measure(self, member: Peer, step: int, *, held_out: bool = False, **more: float) -> None:
        """Let a member tell what it measured at a step."""
        seq = self._seq[member.session] = self._seq.get(member.session, 0) + 1
        slot = int(member.session[-1])
        loss = 1.6 + 2.4 * math.exp(-step / 90) + 0.05 * math.sin(step * (slot + 2))
        values = {
            "loss": loss, "tokens_per_s": 2100.0 - 420 * slot + 60 * math.sin(step / 9),
            "tokens": 512.0 * step, "wall_s": step * 0.5, "compute_s": step * (0.46 - 0.08 * slot),
            "sent_bytes": 8.1e4 * step, "received_bytes": 7.9e4 * step, **more,
        }  # fmt: skip
        if held_out:
            values["held_out_loss"] = loss + 0.12
        began = getattr(self, "_began", None) or time.time() - 240
        self._began = began
        point = Point(began + step * 0.5, step, step // 10, values)
        member.request(Metrics("i1", seq, [point]))

    def round(self, members: list[Peer], number: int) -> None:
        """Let members meet in a round."""
        asked = []
        for slot, member in enumerate(members):
            phases = {"wait": 0.02, "send": 0.05 + 0.02 * slot, "vote": 0.01, "apply": 0.03}
            stats = MemberStats(phases, update_norm=1.0, loss=2.0)
            join = RoundJoin(
                number, base="b" if number == 0 else f"d{number - 1}", tokens=5120, steps=10,
                busy_s=0.3 + 0.1 * slot, stats=stats,
            )  # fmt: skip
            asked.append(member.ask(join))
        plans = [m.answer(id_) for m, id_ in zip(members, asked, strict=True)]
        votes = []
        for member, plan in zip(members, plans, strict=True):
            assert isinstance(plan, RoundPlan)
            names = [m.session.partition("/")[2] for m in members]
            votes.append(
                member.ask(
                    RoundVote(number, plan.epoch, ok=True, digest=f"d{number}", contributors=names)
                )
            )
        for member, vote in zip(members, votes, strict=True):
            verdict = member.answer(vote)
            assert isinstance(verdict, Verdict)
            assert verdict.committed, verdict

    def say(self, job: str, *lines: str, node: str = "kitchen-1", member: str = "w0") -> None:
        """Let a process print lines."""
        key = f"log/{job}/{member}"
        seq = self._seq.get(key, 1)
        self._seq[key] = seq + len(lines)
        self.nodes[node].request(LogLines(job, member, seq, list(lines)))

    def train(self, job: str, *, steps: int = 200, rounds: int = 4) -> list[Peer]:
        """Let a job train for a while."""
        members = self.start(job)
        for step in range(10, steps + 1, 10):
            for slot, member in enumerate(members):
                self.measure(member, step, held_out=slot == 0 and step % 50 == 0)
        for number in range(rounds):
            self.round(members, number)
        members[0].request(Event("checkpoint", "checkpoint of round 2"))
        return members
