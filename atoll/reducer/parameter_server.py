"""A parameter server: one vector that every member's push updates.

Pure and single-threaded: the caller passes asks and lost members in, and gets the answers that are
due, some only after later asks. Its state can be fetched and loaded, so that the group's committed
rounds (*anchors*) preserve it: after a restart it is empty until a member loads the last anchor.

Clocks (stale synchronous parallel, Ho et al. 2013): a member that has finished c clocks may go on
when c - min <= bound, where the minimum is over members that will push again. With `synchronous`
the first n - backups pushes of a clock are averaged in member order; later ones are refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.codec.base import Packet
from atoll.codec.registry import make_codec
from atoll.errors import AtollError, LossNotFinite, WireError
from atoll.reducer.mean import Share, is_finite, is_weight, mean_of, minority
from atoll.reducer.region_rule import server_rule
from atoll.reducer.update_rules import compensate, late_factor
from atoll.reducer.worker_clocks import Reply, WorkerClock, WorkerClocks, WorkerState
from atoll.wire.parameter_server_messages import Answer, Ask, Attach, Fetch, Idle, Load, Push, Setup

Answers = list[tuple[str, Answer, Packet | None]]

FARTHEST = 1024
"""Most pushes that look-ahead extrapolates over: momentum has decayed by then."""

_EXACT = make_codec("fp32")


class ParameterServer:
    """State machine of one server; see the module's docstring."""

    def __init__(self) -> None:
        self.anchor = -1
        self.version = 0
        self.progress = 0.0
        self.setup = Setup()
        self.theta = torch.zeros(0)
        self.clocks = WorkerClocks()
        self._rule = server_rule(self.setup)
        self._lr = 1.0
        """Learning rate of the last push."""
        self._arrivals: dict[str, tuple[Push, Packet]] = {}
        """Pushes of the open clock, in synchronous mode."""
        self._attaching: dict[str, Attach] = {}
        """Members that wait for a newer anchor than this server has loaded."""
        self._gone: set[str] = set()
        """Members lost before their first ask."""
        self._encoded: tuple[tuple[int, int, int], Packet] | None = None
        """The last vector sent, keyed by version, region and pushes of look-ahead."""

    # ------------------------------------------------------------------------ asks

    def handle(self, member: str, ask: Ask, packet: Packet | None = None) -> Answers:
        """Process an ask and return the answers that are now due, to any member."""
        self._gone.discard(member)
        try:
            if isinstance(ask, Attach):
                return self._attach(member, ask)
            if isinstance(ask, Load):
                return self._load(member, ask, packet)
            if ask.anchor != self.anchor:
                return [(member, Answer("unknown", anchor=self.anchor), None)]
            if isinstance(ask, Push):
                return self._push(member, ask, packet)
            if isinstance(ask, Idle):
                return self._idle(member, ask)
            return self._fetch(member)
        except AtollError as error:
            return [(member, Answer("refused", self.anchor, error=error.to_dict()), None)]

    def lose(self, member: str) -> Answers:
        """Stop waiting for a member that is gone or silent; return the answers that are now due."""
        self._gone.add(member)
        self._attaching.pop(member, None)
        worker = self.clocks.workers.get(member)
        if worker is not None and worker.state != WorkerState.LOST:
            worker.state, worker.waiting = WorkerState.LOST, None
        return self._released() + self._loader()

    def held(self) -> Counter[str]:
        """Return the bytes held of each member's pushes, and under an empty name the state."""
        vectors = [self.theta, *self._rule.vectors.values(), *self._rule.working()]
        held = Counter({"": sum(vector.nbytes for vector in vectors)})
        for member, (_, packet) in list(self._arrivals.items()):
            held[member] += len(packet.data)
        return held

    @property
    def computing(self) -> list[str]:
        """Members that compute: no answer to them is held back."""
        return [m for m in self.clocks.pushing if self.clocks.workers[m].waiting is None]

    @property
    def expected(self) -> list[str]:
        """Members that others wait for to load this server."""
        waiting = [m for ask in self._attaching.values() for m in ask.members]
        return [m for m in dict.fromkeys(waiting) if m not in {*self._attaching, *self._gone}]

    # --------------------------------------------------------------------- anchors

    def _attach(self, member: str, ask: Attach) -> Answers:
        if ask.anchor < self.anchor or (ask.anchor > self.anchor and not ask.members):
            return [(member, Answer("unknown", anchor=self.anchor), None)]
        if ask.anchor > self.anchor:
            self._attaching[member] = ask
            return self._loader()
        worker = self.clocks.enter(member)
        worker.waiting, worker.seq, worker.late = None, -1, 0
        return [(member, *self._current_vector(member, worker, want=ask.want))]

    def _loader(self) -> Answers:
        """Ask the first member present to load the anchor."""
        if not self._attaching:
            return []
        newest = max(ask.anchor for ask in self._attaching.values())
        members = next(a.members for a in self._attaching.values() if a.anchor == newest)
        for member in members:
            if member in self._attaching:
                del self._attaching[member]
                return [(member, Answer("load", anchor=self.anchor), None)]
            if member not in self._gone:
                break  # wait: it will attach, or be lost
        return []

    def _load(self, member: str, ask: Load, packet: Packet | None) -> Answers:
        if ask.anchor < self.anchor:
            return [(member, Answer("unknown", anchor=self.anchor), None)]
        answers: Answers = []
        if ask.anchor > self.anchor:
            idle = [m for m, w in self.clocks.workers.items() if isinstance(w.waiting, Idle)]
            self._load_state(ask, packet)
            answers += [(m, Answer("unknown", anchor=self.anchor), None) for m in idle]
            for lost in self._gone & self.clocks.workers.keys():
                self.clocks.workers[lost].state = WorkerState.LOST
        waiting, self._attaching = self._attaching, {}
        for name, attach in [*waiting.items(), (member, Attach(ask.anchor, want=False))]:
            answers += self._attach(name, attach)
        return answers

    def _load_state(self, ask: Load, packet: Packet | None) -> None:
        setup = ask.setup
        if packet is None or not 0 <= setup.parameters <= ask.elements:
            raise WireError("a server cannot be loaded with this", given=str(ask)[:200])
        rule = server_rule(setup)
        sizes = [ask.elements, *(setup.parameters for _ in ask.vectors)]
        vector = _EXACT.decode(packet)
        if vector.numel() != sum(sizes) or set(ask.vectors) - rule.vectors.keys():
            raise WireError(
                "a server cannot be loaded with this", given=f"{vector.numel()} elements",
                expected=f"{sum(sizes)} for {', '.join(['theta', *ask.vectors])}",
            )  # fmt: skip
        theta, *vectors = torch.split(vector, sizes)
        self.setup, self._rule, self.theta = setup, rule, theta.clone()
        self._lr = setup.rate
        for name, values in zip(ask.vectors, vectors, strict=True):
            rule.vectors[name].copy_(values)
        rule.start(self.theta[: setup.parameters], ask.scalars)
        self.anchor, self.version, self.progress = ask.anchor, ask.version, ask.progress
        self._arrivals, self._encoded = {}, None
        self.clocks = WorkerClocks(
            ask.members, speeds=self.clocks.speeds, regions=max(1, len(setup.regions))
        )

    def _idle(self, member: str, ask: Idle) -> Answers:
        """Stop waiting for a member's pushes.

        A member that has finished is answered only when the others reach a sync point or finish
        too: a round waits for joins for a limited time, and would begin without the others.
        """
        worker = self.clocks.enter(member)
        worker.state, worker.final, worker.waiting = WorkerState.IDLE, ask.final, ask
        return self._released()

    def _idle_answers(self) -> Answers:
        meeting = self.clocks.hurry or not self.clocks.pushing
        answers: Answers = []
        for member, worker in self.clocks.workers.items():
            if isinstance(worker.waiting, Idle) and (meeting or not worker.waiting.final):
                worker.waiting = None
                answers.append((member, Answer("idle", anchor=self.anchor), None))
        return answers

    def _fetch(self, member: str) -> Answers:
        rule, parameters = self._rule, self.setup.parameters
        if rule.settle(self.theta[:parameters], lr=self._lr):
            self._moved(0.0)
        vector = torch.cat([self.theta, *rule.vectors.values()])
        answer = Answer(
            "state", anchor=self.anchor, version=self.version, progress=self.progress,
            vectors=list(rule.vectors), scalars=dict(rule.scalars), codec="fp32",
            sizes=[vector.numel()],
        )  # fmt: skip
        return [(member, answer, _EXACT.encode(vector))]

    # ---------------------------------------------------------------------- pushes

    def _push(self, member: str, ask: Push, packet: Packet | None) -> Answers:
        worker = self.clocks.enter(member)
        if ask.seq == worker.seq:  # sent again after a reconnect: never apply it twice
            return [(member, *worker.reply)] if worker.reply is not None else []
        self._check(ask, packet)
        if packet is None:
            return []
        late = self.version - ask.version
        # All start together at a sync point: a first push's lateness does not predict the second's.
        expected = self.clocks.present - 1 if worker.seq < 0 else late
        worker.late = max(0, min(expected, FARTHEST))
        worker.seq, worker.reply = ask.seq, None
        self.clocks.measure(member, ask.steps, ask.busy_s)
        if self.setup.mode == "synchronous":
            return self._enter_clock(member, worker, ask, packet)
        accepted = not self.setup.limit or late <= self.setup.limit
        if accepted:
            self._apply(worker, ask, packet, late=late)
        worker.clock += 1
        worker.waiting = ask
        if not accepted or self.setup.mode == "asynchronous":
            return [self._answer(member, worker, accepted=accepted, late=late), *self._released()]
        return self._released()

    def _check(self, ask: Push, packet: Packet | None) -> None:
        if packet is None or packet.num_elements != self.theta.numel():
            elements = 0 if packet is None else packet.num_elements
            raise WireError(
                "a push does not fit this server", given=f"{elements} elements",
                expected=f"{self.theta.numel()}",
            )  # fmt: skip
        if not (is_weight(ask.weight) and math.isfinite(ask.rate) and ask.steps >= 0):
            raise WireError("a push has numbers that cannot be", given=str(ask)[:200])

    def _decoded(self, packet: Packet) -> Tensor:
        x = make_codec(packet.codec).decode(packet)
        if not is_finite(x):
            raise LossNotFinite("a push has values that are NaN or infinite; it was not applied")
        return x

    def _apply(self, worker: WorkerClock, ask: Push, packet: Packet, *, late: int) -> None:
        setup, present = self.setup, self.clocks.present
        x = self._decoded(packet)
        head, buffers = x[: setup.parameters], x[setup.parameters :]
        if setup.compensation and worker.read is not None:
            now = self.theta[: setup.parameters]
            compensate(head, now, worker.read, strength=setup.compensation)
        factor = late_factor(setup, late)
        if setup.mode == "stale":  # the members take a step of the schedule together
            factor /= present
        if factor != 1.0:
            head.mul_(factor)
        self._lr = setup.rate * ask.rate
        region = worker.region
        self._rule.apply(self.theta[: setup.parameters], head, lr=self._lr, region=region)
        self.theta[setup.parameters :].sub_(buffers, alpha=1.0 / present)
        self._moved(ask.steps / present)

    def _moved(self, steps: float) -> None:
        self.version += 1
        self.progress += steps
        self._encoded = None

    # ---------------------------------------------------------------- synchronous

    def _enter_clock(self, member: str, worker: WorkerClock, ask: Push, packet: Packet) -> Answers:
        """Keep a push for its clock; refuse it if that clock is over."""
        if ask.version != self.version:
            return [self._answer(member, worker, accepted=False, late=self.version - ask.version)]
        self._decoded(packet)  # refuse values that are not finite now, not at the clock's end
        self._arrivals[member] = (ask, packet)
        worker.waiting = ask
        return self._released()

    def _end_clock(self) -> Answers:
        """Apply the mean of a clock's pushes once there are enough."""
        here = [m for m in self.clocks.workers if m in self._arrivals]
        needed = max(1, len(self.clocks.pushing) - self.setup.backups)
        pushing = sum(self.clocks.workers[m].state == WorkerState.PUSHING for m in here)
        if not here or pushing < min(needed, len(self.clocks.pushing)):
            return []
        pushes, self._arrivals = self._arrivals, {}
        setup = self.setup
        shares = [Share(m, pushes[m][1], pushes[m][0].weight) for m in here]
        odd = minority(shares)
        answers: Answers = [self._refusal(m, error) for m, error in odd.items()]
        shares = [share for share in shares if share.member not in odd]
        here = [share.member for share in shares]
        steps = sum(pushes[m][0].steps for m in here) / len(here)
        try:
            mean = mean_of(shares, codec=make_codec(shares[0].packet.codec))
        except AtollError as error:
            return answers + [self._refusal(m, error) for m in here]
        x = make_codec(mean.packet.codec).decode(mean.packet)
        lr = setup.rate * pushes[here[0]][0].rate
        self._rule.apply(self.theta[: setup.parameters], x[: setup.parameters], lr=lr)
        self.theta[setup.parameters :].sub_(x[setup.parameters :])
        self._moved(steps)
        for member in here:
            worker = self.clocks.workers[member]
            worker.clock += 1
            answers.append(self._answer(member, worker))
        return answers

    def _refusal(self, member: str, error: AtollError) -> tuple[str, Answer, Packet | None]:
        worker = self.clocks.workers[member]
        worker.waiting, worker.reply = None, (Answer("refused", error=error.to_dict()), None)
        return (member, *worker.reply)

    # --------------------------------------------------------------------- answers

    def _released(self) -> Answers:
        answers = self._idle_answers()
        if self.setup.mode == "synchronous":
            return answers + self._end_clock()
        for member in self.clocks.pushing:
            worker = self.clocks.workers[member]
            ahead = worker.clock - self.clocks.slowest()
            if isinstance(worker.waiting, Push) and ahead <= self.setup.bound:
                answers.append(self._answer(member, worker))
        return answers

    def _answer(
        self, member: str, worker: WorkerClock, *, accepted: bool = True, late: int = 0
    ) -> tuple[str, Answer, Packet | None]:
        """Answer a member's push, and keep the answer for a repeated ask."""
        worker.waiting = None
        worker.reply = self._current_vector(member, worker, accepted=accepted, late=late)
        return (member, *worker.reply)

    def _current_vector(
        self,
        member: str,
        worker: WorkerClock,
        *,
        want: bool = True,
        accepted: bool = True,
        late: int = 0,
    ) -> Reply:
        """Return the current vector and the member's next steps."""
        steps = length = self.setup.every
        if self.setup.mode == "asynchronous":  # with clocks all members do the same steps
            steps, length = self.clocks.plan(member, steps, dynamic=self.setup.dynamic)
        packet = self._encoded_vector(worker) if want else None
        if self.setup.compensation:
            worker.read = self.theta[: self.setup.parameters].clone()
        answer = Answer(
            "theta", anchor=self.anchor, version=self.version, clock=worker.clock,
            progress=self.progress, steps=steps, length=length, accepted=accepted,
            staleness=late, hurry=self.clocks.hurry,
            codec=packet.codec if packet is not None else "",
            sizes=list(packet.sizes) if packet is not None else [],
        )  # fmt: skip
        return answer, packet

    def _encoded_vector(self, worker: WorkerClock) -> Packet:
        """Return what a member trains from: its region's model, or the vector.

        With `look_ahead` it is moved on as momentum will until the member's next push, so that its
        update is computed near the vector that it will be applied to (Ajanthan et al. 2025,
        https://openreview.net/forum?id=4O8nzTkHPI). The server's own vector stays.
        """
        setup, theta = self.setup, self.theta
        head = theta[: setup.parameters]
        pushes = worker.late if setup.look_ahead else 0
        key = (self.version, worker.region, pushes)
        if self._encoded is None or self._encoded[0] != key:
            model = self._rule.model_of(head, worker.region)
            move = self._rule.momentum_move(pushes, lr=self._lr) if pushes else None
            if move is not None:
                model = torch.sub(model, move, alpha=setup.look_ahead)
            if model is not head:
                theta = torch.cat([model, theta[setup.parameters :]])
            self._encoded = (key, make_codec(setup.reply).encode(theta))
        return self._encoded[1]


def expected_sizes(ask: Ask) -> Sequence[int]:
    """Return the sizes of the packet that belongs to an ask."""
    if isinstance(ask, Push):
        return ask.sizes
    if isinstance(ask, Load):
        return [ask.elements + len(ask.vectors) * ask.setup.parameters]
    return []


def working_bytes(ask: Ask) -> int:
    """Return the bytes that an ask needs besides its packet: two vectors for each region."""
    if not isinstance(ask, Load):
        return 0
    return 2 * len(ask.setup.regions) * 4 * max(0, ask.setup.parameters)


__all__ = ["Answers", "Fetch", "ParameterServer", "expected_sizes", "working_bytes"]
