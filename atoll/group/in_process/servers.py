"""Parameter servers inside one process: for a member alone, and for members on threads.

On threads, what comes first is decided by a virtual clock, not by the machine: every member has a
speed in steps per virtual second, and a push is admitted when no member that still computes could
push earlier; ties go by slot. So two runs give the same bits, and a slow member can be tried out in
no time.
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
from atoll.reducer.update_rules import make_rule
from atoll.wire.parameter_server_messages import Answer, Ask, Attach, Load, Push, Setup


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """What a parameter server answered."""

    answer: Answer
    packet: Packet | None
    sent_bytes: int = 0
    received_bytes: int = 0


class LocalServers:
    """The servers of a member that is alone: they answer at once."""

    def __init__(self) -> None:
        """Start without any."""
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
    """Member -> virtual seconds at its last answer."""
    pending: dict[str, tuple[float, Ask, Packet | None]] = field(default_factory=dict)
    answers: dict[str, tuple[Answer, Packet | None]] = field(default_factory=dict)

    def meet(self, members: Sequence[str], at: float) -> float:
        """Let members that have held an anchor be where the last of them came; return when."""
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

        Args:
            changed: The coordinator's lock; notified when a waiting member may go on.
            order: All members in slot order; it may grow.
            ended: Who will not come back, and why.
            is_awaited: Whether a member lives and is not taken for gone; called with the lock held.
            timeout_s: Longest wait for an answer.
        """
        self.speeds: dict[str, float] = {}
        """Member -> steps per virtual second; 1.0 where nothing is said. A test may set it."""
        self.log: list[tuple[float, str]] = []
        """Virtual time and member of every push that the first server took in."""
        self._changed, self._order, self._ended = changed, order, ended
        self._is_awaited, self._timeout_s = is_awaited, timeout_s
        self._served: dict[int, _Server] = {}

    def ask(self, member: str, number: int, ask: Ask, packet: Packet | None) -> ServerRequest:
        """Return a server's answer; waits for members that could push before, by virtual time."""
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
        """Let a server forget everything, as when its process is killed and started again."""
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
        """Return a server, to be looked at."""
        return self._served.setdefault(number, _Server()).server

    def _look(self, number: int, served: _Server, member: str) -> bool:
        self._turn(number, served)
        return member in served.answers

    def _turn(self, number: int, served: _Server) -> None:
        """Take in what is due in virtual time; the condition is held."""
        server = served.server
        before = len(served.answers)
        known = {*self._order, *server.clocks.workers, *server.expected}
        for name in [m for m in sorted(known) if not self._is_awaited(m)]:
            worker = server.clocks.workers.get(name)
            if worker is None or worker.state != "lost":
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
        """Return whose ask comes next; None while somebody computes who could be earlier."""
        for member, (_, ask, _) in served.pending.items():
            if isinstance(ask, Attach | Load):  # they move nothing, whenever they come
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
    """Return the bytes of what was sent and received."""
    return len(packet.data) if packet else 0, len(reply.data) if reply else 0


def rule_state(setup: Setup) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the vectors and numbers that a server's rule begins with."""
    rule = make_rule(setup)
    return rule.vectors, rule.scalars
