"""A hostile member answers a newcomer that asks for the committed state."""

from __future__ import annotations

import contextlib
import time

import msgspec

from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.member_messages import Recover, Sources, Standing
from atoll.wire.recovery_messages import (
    ANSWERS,
    ASKS,
    CHUNK,
    MANIFEST,
    OFFER,
    OK,
    StateAnswer,
    StateAsk,
    pack_answer,
    pack_ask,
    unpack_answer,
    unpack_ask,
)
from bench.attack.attacks import NotTried, Suite, hold
from bench.attack.members import Member, json_of, member_of
from bench.attack.session import WAIT_S, until
from bench.attack.site import Site

suite = Suite()

DONORS = "members accept a state from donors by its digests only"


class Liar:
    """Offers the state that an honest donor offers, and sends something else."""

    def __init__(self, member: Member) -> None:
        self._session, self._job = member.session, member.site.job
        self.requests: list[str] = []
        """What newcomers asked it for."""
        self._truth: StateAnswer | None = None
        self._number = 0

    def stand(self) -> None:
        """Tell the hub that it has the newest state, as an honest donor names it.

        Again and again: a member that takes no part in rounds is asked last.
        """
        sources = self._session.got(Recover(), Sources)
        known = self._truth
        if known is not None and known.round == sources.round:
            donor = [peer.member for peer in sources.peers][:1]
            self._session.ask(Standing(known.round, known.base, donor))
            return
        for peer in sources.peers:
            self._number += 1
            ask = StateAsk(self._number, OFFER, sources.round)
            self._session.relay(f"{self._job}/{peer.member}", *pack_ask(ask))
            for _ in range(10):
                found = self.answer_requests(wait_s=0.2)
                if found is None or found.number != self._number:
                    continue
                if found.status == OK and found.round == sources.round:
                    self._truth = found
                    self._session.ask(Standing(found.round, found.base, [peer.member]))
                    return
                break

    def answer_requests(self, *, wait_s: float) -> StateAnswer | None:
        """Answer what newcomers ask, for a while; return the last answer to an own question."""
        with contextlib.suppress(TimeoutError):
            self._session.hear(lambda: bool(self._session.relayed), wait_s=wait_s)
        messages, self._session.relayed[:] = list(self._session.relayed), []
        answer = None
        for source, payload in messages:
            if payload.startswith(ASKS):
                self._lie(source, unpack_ask(memoryview(payload)))
            elif payload.startswith(ANSWERS):
                answer, _ = unpack_answer(memoryview(payload))
        return answer

    def _lie(self, to: str, ask: StateAsk) -> None:
        if self._truth is None:
            return
        self.requests.append(ask.kind)
        said = msgspec.structs.replace(
            self._truth, number=ask.number, key="", fingerprint="", image=ask.image, index=ask.first
        )
        body = b""
        if ask.kind == CHUNK:
            body = bytes(CHUNK_BYTES)
        elif ask.kind == MANIFEST:
            size = next((i.manifest_bytes for i in said.images if i.name == ask.image), 64)
            body = bytes(size)
        if ask.kind != OFFER:
            said = msgspec.structs.replace(said, images=[])
        self._session.relay(to, *pack_answer(said, body))


@suite.attack(DONORS, quick=False)
def be_a_hostile_donor(site: Site) -> str:
    """Stand with the true digest, offer the true images, and send zeros for them."""
    member = member_of(site)
    liar, since = Liar(member), site.last_event()
    victims = {m: p for m, p in site.cluster.workers().items() if m != member.launch.member}
    victim, process = sorted(victims.items())[0]
    process.kill()  # as any machine may fail: a newcomer takes its place, and needs the state

    def recovered() -> bool:
        events = site.operator.events(site.job, after=since)["events"]
        return any(e["kind"] == "recovered" and e.get("member") == victim for e in events)

    deadline = time.monotonic() + 2 * WAIT_S
    while not recovered():
        if time.monotonic() > deadline:
            hold(False, f"{victim} never got a state again")
        liar.stand()
        liar.answer_requests(wait_s=0.2)
    rounds = site.await_rounds(2)
    until(lambda: victim in site.cluster.workers(), f"{victim} trains again")
    if not liar.requests:
        raise NotTried("the newcomer asked other members only")
    events = site.operator.events(site.job, after=since)["events"]
    named = sorted({e["kind"] for e in events if "source" in e["kind"]
                    and member.launch.member in json_of(e)})  # fmt: skip
    return (
        f"asked {len(liar.requests)} times; {victim} took the state from others and trains on "
        f"(round {rounds}); the liar is named: {', '.join(named) or 'no'}"
    )
