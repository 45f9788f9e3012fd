"""Taking over the committed state from simulated donors, chunk by chunk, hashes checked.

It follows the order of the real thing: ask who has it, take the manifests, take chunks from several
at once, replace a donor that dies or lies, ask again whether the round is still the newest one,
load, and tell. Small chunks make it long enough to be hit anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.errors import GroupError, PeerLost
from atoll.wire.messages import Lease, Sources
from tests.faults.simulation.fibers import SimulatedFuture
from tests.faults.simulation.state import Replica, digest_of

if TYPE_CHECKING:
    from tests.faults.simulation.member import Member

CHUNK = 12
ANSWER_S = 3.0
"""Silence of a donor after which another is asked."""


def fetch(member: Member, group: Any) -> tuple[Replica, Lease | None, float, list[str]]:
    """Return the newest committed state, what to train on, the pace, and who gave it."""
    world, failed = member.world, set[str]()
    for _ in range(64):
        world.reached("member", "recovering: asked", member)
        sources: Sources = group.recover(sorted(failed))
        if not sources.peers:
            replica = _from_checkpoint(member, sources)
            return replica, sources.lease, sources.pace, ["checkpoint"]
        data, givers = _take(member, sources, failed)
        if data is None:
            world.fibers.sleep(0.2)
            continue
        world.reached("member", "recovering: loading", member)
        world.fibers.sleep(0.01)
        answer: Sources = group.recover([])
        if answer.peers and answer.round == sources.round:
            return Replica.from_bytes(data), answer.lease, answer.pace, givers
        if not answer.peers:
            return _from_checkpoint(member, answer), answer.lease, answer.pace, ["checkpoint"]
    raise GroupError("the committed state was not to be had", given=member.name)


def _from_checkpoint(member: Member, sources: Sources) -> Replica:
    if sources.checkpoint_round < 0:
        return Replica(round_=max(0, sources.round))
    return member.world.checkpoint(sources.checkpoint_round)


def _take(member: Member, sources: Sources, failed: set[str]) -> tuple[bytes | None, list[str]]:
    """Return the bytes of the state, or None when nobody could give them."""
    world = member.world
    manifests: dict[str, tuple[str, list[str]]] = {}
    for peer in sources.peers:
        try:
            kind, *rest = ask(member, peer.member, ("manifest", sources.round))
        except PeerLost:
            failed.add(peer.member)
            continue
        if kind == "manifest":
            manifests[peer.member] = (rest[0], rest[1])
        else:
            failed.add(peer.member)
    if not manifests:
        return None, []
    world.reached("member", "recovering: manifest", member)
    roots = [root for root, _ in manifests.values()]
    root = max(roots, key=roots.count)
    donors = [donor for donor, (own, _) in manifests.items() if own == root]
    hashes = manifests[donors[0]][1]
    chunks: list[bytes] = []
    for index, expected in enumerate(hashes):
        chunk = None
        while donors and chunk is None:
            donor = donors[index % len(donors)]
            member.donor = donor
            if index == 1:
                world.reached("member", "recovering: chunk", member)
            try:
                kind, *rest = ask(member, donor, ("chunk", sources.round, index))
            except PeerLost:
                kind, rest = "lost", []
            if kind == "chunk" and digest_of(rest[0]) == expected:
                chunk = rest[0]
            else:
                donors.remove(donor)
                failed.add(donor)
        if chunk is None:
            return None, []
        chunks.append(chunk)
    return b"".join(chunks), donors


def ask(member: Member, donor: str, question: tuple[Any, ...]) -> tuple[Any, ...]:
    """Ask a donor and return its answer.

    Raises:
        PeerLost: it is not there, its connection broke, or it was silent for too long.
    """
    world = member.world
    target = world.member(donor)
    if target is None or not target.alive:
        raise PeerLost("nobody is there", given=donor)
    future = SimulatedFuture(world.fibers)
    member.waiting_for[target] = future
    lines = [member.line, target.line]

    def answer() -> None:
        reply = target.answer(question)
        if target.alive and target.running:
            when = max(line.arrival(200, 0) for line in lines)
            world.scheduler.at(when, lambda: future.offer(reply), member)

    when = max(line.arrival(100, 0) for line in lines)
    world.scheduler.at(when, answer, target)
    try:
        reply: tuple[Any, ...] = future.result(ANSWER_S)
        return reply
    except TimeoutError:
        raise PeerLost("a donor does not answer", given=donor) from None
    finally:
        member.waiting_for.pop(target, None)
