"""Parameter servers inside one process: for a single member, and for members on threads.

On threads the order of pushes is decided by a virtual clock: every member has a speed in steps per
virtual second, and a push is processed when no computing member could push earlier; ties go by
slot. Runs are therefore bitwise reproducible, and slow members cost no real time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from atoll.codec.base import Packet
from atoll.errors import AtollError, DeadlineExceeded
from atoll.reducer.parameter_server import ParameterServer
from atoll.reducer.region_rule import server_rule
from atoll.reducer.worker_clocks import WorkerState
from atoll.wire.parameter_server_messages import Answer, Ask, Attach, Load, Push, Setup


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """A parameter server's answer."""

    answer: Answer
    packet: Packet | None
    sent_bytes: int = 0
    received_bytes: int = 0


class LocalServers:
    """The servers of a member without peers: they answer at once."""

    def __init__(self) -> None:
        self._servers: dict[int, ParameterServer] = {}

    def ask(self, member: str, number: int, ask: Ask, packet: Packet | None) -> ServerRequest:
        """Return a server's answer."""
        server = self._servers.setdefault(number, ParameterServer())
        answers = server.handle(member, ask, packet)
        for name, answer, reply in answers:
            if name == member:
                return ServerRequest(answer, reply)
        raise DeadlineExceeded("a parameter server holds back its only member", given=str(ask))


@dataclass(slots=True)
class _Server:
    """One server and its virtual clock."""

    server: ParameterServer = field(default_factory=ParameterServer)
    times: dict[str, float] = field(default_factory=dict)
    """Member -> virtual time of its last answer."""
    pending: dict[str, tuple[float, Ask, Packet | None]] = field(default_factory=dict)
    answers: dict[str, tuple[Answer, Packet | None]] = field(default_factory=dict)

    def meet(self, members: Sequence[str], at: float) -> float:
        """Advance members that loaded an anchor to the time of the last of them; return it."""
        at = max(at, *(self.times.get(member, 0.0) for member in members))
        self.times.update(dict.fromkeys(members, at))
        return at


class MemoryServers:
    """The parameter servers of a :class:`MemoryGroups`."""

    def __init__(
        self,
        *,
        changed: threading.Condition,
        order: Sequence[str],
        ended: Mapping[str, AtollError],
        is_awaited: Callable[[str], bool],
        timeout_s: float,
    ) -> None:
        """Serve the members of a coordinator.

        `changed` is the coordinator's lock, held when `is_awaited` is called. `order` lists all
        members by slot and may grow; `ended` has the errors of members that ended.
        """
        self.speeds: dict[str, float] = {}
        """Member -> steps per virtual second, default 1.0; set by tests."""
        self.log: list[tuple[float, str]] = []
        """Virtual time and member of every push that the first server processed."""
        self._changed, self._order, self._ended = changed, order, ended
        self._is_awaited, self._timeout_s = is_awaited, timeout_s
        self._served: dict[int, _Server] = {}

    def ask(self, member: str, number: int, ask: Ask, packet: Packet | None) -> ServerRequest:
        """Return a server's answer, after those of members that push earlier in virtual time."""
        with self._changed:
            served = self._served.setdefault(number, _Server())
            at = served.times.get(member, 0.0)
            if isinstance(ask, Push):
                spent_s = ask.steps / self.speeds.get(member, 1.0)
                ask, at = msgspec.structs.replace(ask, busy_s=spent_s), at + spent_s
            served.answers.pop(member, None)
            served.pending[member] = (at, ask, packet)
            self._turn(number, served)
            self._changed.wait_for(
                lambda: self._look(number, served, member) or member in self._ended,
                self._timeout_s,
            )
            served.pending.pop(member, None)
            if member in served.answers:
                answer, reply = served.answers.pop(member)
                return ServerRequest(answer, reply, *_weights(packet, reply))
            if member in self._ended:
                raise self._ended[member]
            raise DeadlineExceeded(
                "a parameter server did not answer", given=f"waited {self._timeout_s:.1f} s"
            )

    def restart(self, number: int = 0) -> None:
        """Reset a server, as if its process were killed and restarted."""
        with self._changed:
            served = self._served.setdefault(number, _Server())
            served.server = ParameterServer()
            for member, (_, ask, _) in list(served.pending.items()):
                if not isinstance(ask, Attach | Load):
                    served.pending.pop(member)
                    served.answers[member] = (Answer("unknown"), None)
            for member in served.times.keys() - served.pending.keys() - served.answers.keys():
                served.answers[member] = (Answer("unknown"), None)
            self._changed.notify_all()

    def server(self, number: int = 0) -> ParameterServer:
        """Return a server, for inspection."""
        return self._served.setdefault(number, _Server()).server

    def _look(self, number: int, served: _Server, member: str) -> bool:
        self._turn(number, served)
        return member in served.answers

    def _turn(self, number: int, served: _Server) -> None:
        """Process the asks that are due in virtual time. Called with the lock held."""
        server = served.server
        before = len(served.answers)
        known = {*self._order, *server.clocks.workers, *server.expected}
        for name in [m for m in sorted(known) if not self._is_awaited(m)]:
            worker = server.clocks.workers.get(name)
            if worker is None or worker.state != WorkerState.LOST:
                self._deliver(served, server.lose(name), 0.0)
        while served.pending:
            member = self._next(served)
            if member is None:
                break
            at, ask, packet = served.pending.pop(member)
            at = max(at, served.times.get(member, 0.0))
            if isinstance(ask, Load) and ask.anchor > server.anchor:
                at = served.meet(ask.members, at)
            served.times[member] = at
            if isinstance(ask, Push) and number == 0:
                self.log.append((at, member))
            self._deliver(served, server.handle(member, ask, packet), at)
        if len(served.answers) != before:
            self._changed.notify_all()

    def _next(self, served: _Server) -> str | None:
        """Return the member with the next ask; None if a computing member could be earlier."""
        for member, (_, ask, _) in served.pending.items():
            if isinstance(ask, Attach | Load):  # these do not change the vector
                return member
        if set(served.server.computing) - served.pending.keys():
            return None
        return min(served.pending, key=lambda m: (served.pending[m][0], self._order.index(m)))

    def _deliver(
        self, served: _Server, answers: Sequence[tuple[str, Answer, Packet | None]], at: float
    ) -> None:
        for name, answer, reply in answers:
            served.answers[name] = (answer, reply)
            served.times[name] = max(served.times.get(name, 0.0), at)


def _weights(packet: Packet | None, reply: Packet | None) -> tuple[int, int]:
    return len(packet.data) if packet else 0, len(reply.data) if reply else 0


def rule_state(setup: Setup) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the initial vectors and numbers of a server's rule."""
    rule = server_rule(setup)
    return rule.vectors, rule.scalars
