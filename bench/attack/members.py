"""A hostile machine gets a member's place in a job that trains, and lies in every round."""

from __future__ import annotations

import contextlib
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from websockets.exceptions import ConnectionClosed

from atoll.models.registry import build_model
from atoll.node.identity.identity import Identity
from atoll.wire.chunks import ChunkHead, count_pieces, pack_chunk
from atoll.wire.frames import encode_relay
from atoll.wire.job_messages import Launch, ProcessState
from atoll.wire.limits import CHUNK_BYTES, MAX_CONTROL_BYTES
from atoll.wire.member_messages import Recover, Register, Registered, Sources, Standing
from atoll.wire.messages import (
    Beat,
    Commitment,
    Done,
    Failure,
    LogLines,
    Metrics,
    Point,
    QueueAck,
    QueueAckMany,
    QueueClaim,
    QueueItems,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
    pack,
    unpack_command,
)
from atoll.wire.recovery_messages import OFFER, OK, StateAsk, pack_ask, unpack_answer
from atoll.wire.states import ProcessPhase
from bench.attack.attacks import Suite, hold
from bench.attack.session import Session
from bench.attack.site import EVIL, MODEL, Site

suite = Suite()

NAMED = "one bad member never stops a run, and is named"
MEMORY = "what a member announces takes no memory"
EPOCHS = "what was sent in another epoch counts no more"

BEAT_S = 2.0


class Member:
    """The member of the live job that the hostile machine was given."""

    def __init__(self, site: Site) -> None:
        """Join as a machine, get a launch, and enter the job with its token."""
        self.site = site
        self._incarnation = f"evil-{secrets.token_hex(4)}"  # one that was replaced is refused
        self.me: Identity = site.node(name=EVIL)
        self._stack = contextlib.ExitStack()
        self._node = self._open(self.me.node, self.me.token)
        self.launch = self._claim()
        self.session = self._open(f"{site.job}/{self.launch.member}", self.launch.token)
        self.registered = self.session.got(Register(), Registered)
        model = build_model("gpt", **MODEL)
        self.size = sum(each.numel() for each in model.parameters())
        """Elements of the job's vector."""
        self.recover()

    def _open(self, address: str, token: str) -> Session:
        session = self._stack.enter_context(
            self.site.session(address, token, me=self.me, incarnation=self._incarnation)
        )
        if not session.welcome:
            raise RuntimeError(f"{address} was not let in: {session.answer}")
        stop = threading.Event()

        def beat() -> None:
            with contextlib.suppress(Exception):
                while not stop.wait(BEAT_S):
                    session.opened.send(pack(Beat(time=time.time())))

        threading.Thread(target=beat, daemon=True).start()
        self._stack.callback(stop.set)
        return session

    def _claim(self) -> Launch:
        queue = f"node/{self.me.node}"
        while True:
            found = self._node.got(QueueClaim(queue, lease_s=60.0, wait_s=60.0), QueueItems)
            for item in found.items:
                command = unpack_command(item.payload)
                self._node.ask(QueueAck(queue, item.lease))
                if isinstance(command, Launch) and command.job == self.site.job:
                    for phase in (ProcessPhase.STARTING, ProcessPhase.RUNNING):
                        state = ProcessState(
                            command.job, command.member, phase, attempt=command.attempt
                        )
                        self._node.ask(state)
                    return command

    def close(self) -> None:
        """End its sessions."""
        self._stack.close()

    # ------------------------------------------------------------------------------- its part

    def recover(self) -> None:
        """Tell the hub that it has the committed state, as a donor names it."""
        deadline = time.monotonic() + 120.0
        while time.monotonic() < deadline:
            sources = self.session.got(Recover(), Sources)
            for peer in sources.peers:
                answer = self._offer(peer.member, sources.round)
                if answer is None:
                    continue
                said = self.session.ask(Standing(sources.round, answer, [peer.member]))
                if isinstance(said, Done):
                    self.round, self.base = sources.round, answer
                    return
        raise TimeoutError("no donor names its state")

    def _offer(self, donor: str, round_: int) -> str | None:
        self.session.relayed.clear()
        self.session.relay(f"{self.site.job}/{donor}", *pack_ask(StateAsk(1, OFFER, round_)))
        with contextlib.suppress(TimeoutError):
            self.session.hear(lambda: bool(self.session.relayed), wait_s=20.0)
        for _, payload in self.session.relayed:
            with contextlib.suppress(Exception):
                answer, _ = unpack_answer(memoryview(payload))
                if answer.status == OK and answer.round == round_:
                    return answer.base
        return None

    def plan(self) -> RoundPlan:
        """Join rounds until one plans with this member."""
        deadline = time.monotonic() + 180.0
        while time.monotonic() < deadline:
            said = self.session.ask(RoundJoin(self.round, self.base, steps=1, tokens=64))
            if isinstance(said, RoundPlan):
                return said
            self.recover()
        raise TimeoutError("no round plans with this member")

    def vote(self, plan: RoundPlan, *, ok: bool = True, digest: str = "", reason: str = "") -> Any:
        """Vote; return the verdict, or the failure."""
        return self.session.ask(
            RoundVote(plan.round, plan.epoch, ok, digest, list(plan.members), reason=reason)
        )

    def head(self, plan: RoundPlan, **changes: Any) -> ChunkHead:
        """Return the head of an honest contribution of this size, with changes."""
        nbytes = 4 * self.size
        head = ChunkHead(
            "contribute", plan.epoch, plan.round, 0, count_pieces(nbytes), nbytes, "fp32",
            [self.size], 1.0,
        )  # fmt: skip
        return msgspec.structs.replace(head, **changes)

    def contribute(self, plan: RoundPlan, piece: bytes, **changes: Any) -> None:
        """Send one piece to the reducer."""
        self.session.relay(plan.reducer, *pack_chunk(self.head(plan, **changes), piece))


def member_of(site: Site) -> Member:
    if site.evil is None:
        site.evil = Member(site)
    assert isinstance(site.evil, Member)
    return site.evil


def _named(site: Site, member: str, *, since: int) -> list[str]:
    """Return the kinds of the events since then that name the member."""
    events = site.operator.events(site.job, after=since)["events"]
    return sorted({e["kind"] for e in events if member in json_of(e)})


def json_of(event: dict[str, Any]) -> str:
    """Return an event as text."""
    return f"{event['text']} {event.get('fields')}"


@contextlib.contextmanager
def _watched(site: Site) -> Iterator[Callable[[], str]]:
    """Yield what reports, after the attack, that the others went on and who was named."""
    since, member = site.last_event(), member_of(site)

    def summary() -> str:
        rounds = site.await_rounds(2)
        kinds = _named(site, member.launch.member, since=since)
        hold(kinds, f"{member.launch.member} is named in no event")
        return f"the others commit on (round {rounds}); it is named: {', '.join(kinds)}"

    yield summary


BAD_HEADS: dict[str, dict[str, Any]] = {
    "a codec of 5,000 digits": {"codec": "int8:" + "9" * 5_000},
    "500 nested codecs": {"codec": "feedback(" * 500 + "fp32" + ")" * 500},
    "an unknown codec": {"codec": "fp99"},
    "negative sizes": {"sizes": [-1, 5]},
    "weight NaN": {"weight": float("nan")},
    "weight -1": {"weight": -1.0},
    "speaks for others": {"contributors": ["w0", "w1"]},
    "16 PiB": {"sizes": [2**52], "total_bytes": 2**54, "count": count_pieces(2**54)},
    "1 GiB": {"sizes": [2**28], "total_bytes": 2**30, "count": count_pieces(2**30)},
}


@suite.attack(NAMED)
def send_contributions_that_cannot_be_decoded(site: Site) -> str:
    member = member_of(site)
    reducers = {process.pid for process in site.cluster.reducers()}
    before_mb = site.reducer_mb()
    with _watched(site) as summary:
        for changes in BAD_HEADS.values():
            plan = member.plan()
            head = member.head(plan, **changes)
            piece = bytes(min(CHUNK_BYTES, head.total_bytes))
            member.session.relay(plan.reducer, *pack_chunk(head, piece))
            member.vote(plan, ok=False, reason="nothing came")
        for payload in (b"", b"\xff\xff", b"\x00\x01\xc1", b"\x00\x02\x93\x01", bytes(300_000)):
            member.session.relay(f"{site.job}/reducer", payload)
        text = summary()
    after_mb = site.reducer_mb()
    hold(after_mb - before_mb < 300, f"the reducer grew by {after_mb - before_mb:.0f} MB")
    hold({p.pid for p in site.cluster.reducers()} == reducers, "the reducer ended and was replaced")
    return f"{len(BAD_HEADS)} heads, 5 payloads, reducer {after_mb - before_mb:+.0f} MB: {text}"


@suite.attack(NAMED)
def contribute_absurd_values(site: Site) -> str:
    member = member_of(site)
    with _watched(site) as summary:
        for value in (3e38, float("nan"), float("inf"), -1e30):
            plan = member.plan()
            member.contribute(plan, struct.pack("=f", value) * member.size)
            member.vote(plan, ok=False, reason="nothing came")
        return summary()


@suite.attack(NAMED)
def vote_for_a_digest_that_is_a_lie(site: Site) -> str:
    member = member_of(site)
    with _watched(site) as summary:
        for number in range(4):
            plan = member.plan()
            member.contribute(plan, bytes(4 * member.size))
            said = member.vote(plan, digest=f"{number:032x}")
            hold(
                not (isinstance(said, Verdict) and said.committed and said.digest[:8] == "0" * 8),
                "the lie was committed",
            )
            with contextlib.suppress(TimeoutError):
                member.recover()
        return summary()


@suite.attack(NAMED)
def vote_against_every_round(site: Site) -> str:
    member = member_of(site)
    with _watched(site) as summary:
        for reason in ("I do not like it", "", "x" * (MAX_CONTROL_BYTES - 500), "\x1b[2J"):
            plan = member.plan()
            member.vote(plan, ok=False, reason=reason)
            with contextlib.suppress(TimeoutError):
                member.recover()
        return summary()


@suite.attack(NAMED, quick=False)
def join_and_then_say_nothing(site: Site) -> str:
    member = member_of(site)
    with _watched(site) as summary:
        for _ in range(2):
            member.plan()
        return summary()


@suite.attack(EPOCHS)
def replay_old_epochs(site: Site) -> str:
    """Joins, votes and contributions of an epoch that is over, while newer ones run."""
    member = member_of(site)
    old = member.plan()
    member.vote(old, ok=False, reason="it was replaced")
    site.await_rounds(3)
    seen = site.operator.job(site.job)["committed_round"]
    answers = set()
    for epoch in (old.epoch, 0, -1, old.epoch + 1_000_000, 2**62):
        stale = replace_plan(old, epoch=epoch)
        said = member.vote(stale, digest="0" * 32)
        answers.add(type(said).__name__)
        hold(not (isinstance(said, Verdict) and said.committed), f"epoch {epoch} was committed")
        member.contribute(stale, bytes(4 * member.size))
    for round_ in (old.round, 0, -1, 2**62):
        said = member.session.ask(RoundJoin(round_, member.base), wait_s=60.0)
        answers.add(type(said).__name__)
        hold(isinstance(said, Failure), f"a join of round {round_} was answered with {said}")
    now = site.await_rounds(2)
    hold(now > seen, "the run was set back")
    member.recover()
    return f"answers {sorted(answers)}; the others commit on (round {now})"


def replace_plan(plan: RoundPlan, **changes: Any) -> RoundPlan:
    """Return a plan with changes."""
    return msgspec.structs.replace(plan, **changes)


@suite.attack("one message is not the work of a thousand")
def keep_the_hub_busy_with_one_frame(site: Site) -> str:
    """What others do in a transaction would wait for each of these for seconds."""
    member, job = member_of(site), site.job
    site.evil = None
    member.close()
    frames = {
        "lines": LogLines(job, member.launch.member, 1, [""] * 3_000_000),
        "a long name": LogLines(job, "m" * 3_000_000, 1, ["x"] * 300),
        "points": Metrics("i", 1, [Point(0.0, 1, 0, {})] * 80_000),
        "leases": QueueAckMany(f"{job}/q", [f"{n}.x" for n in range(300_000)]),
        "figures": Beat(stats={str(n): 0.0 for n in range(200_000)}),
        "measured lines": RoundJoin(0, "", lines={f"w{n}": (0.1, 1e6) for n in range(100_000)}),
        "lines of no length": RoundJoin(0, "", lines={"w0": (float("nan"), 1e6)}),
        "a long commitment": RoundJoin(
            0, "", commitment=Commitment(0, 1, 1, 0, marks=["d" * 32] * 50_000)
        ),
    }
    address, longest = f"{job}/{member.launch.member}", 0.0
    for number, (what, body) in enumerate(frames.items()):
        with site.session(
            address, member.launch.token, me=member.me, incarnation=f"busy-{number}"
        ) as session:
            hold(session.welcome, "no session")
            session.opened.send(pack(body, id=2))
            began = time.monotonic()
            site.operator.create_ticket(role="viewer", uses=1, valid_s=60.0)
            longest = max(longest, time.monotonic() - began)
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                session.hear(lambda: False, wait_s=60.0)
            hold(session.opened.close_code is not None, f"a frame was taken: {what}")
    rounds = site.await_rounds(1)
    return f"{len(frames)} frames: refused, another's write took {longest:.1f} s (round {rounds})"


@suite.attack("a relayed frame names its true sender")
def send_under_another_name(site: Site) -> str:
    member = member_of(site)
    address = f"{site.job}/{member.launch.member}"
    with site.session(address, member.launch.token, me=member.me, incarnation="forger") as session:
        hold(session.welcome, "no session")
        session.opened.send(encode_relay(f"{site.job}/reducer", f"{site.job}/w0", b"forged"))
        with contextlib.suppress(Exception):
            for _ in range(60):
                session.opened.recv(timeout=1.0)
        hold(session.opened.close_code is not None, "a frame under another name was passed on")
    site.evil = None
    member.close()
    return "its session was closed"
