"""An island of four processes, one of which dies at a moment that is chosen: for one test.

One process loads everything and forks the ranks; what is otherwise the hub is in the process of the
test, and the first rank asks it over a pipe.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group

from atoll.checkpoint import DirectoryStore, Extras
from atoll.codec import make_codec
from atoll.config import StrategyTable
from atoll.group.aggregation import Aggregation
from atoll.group.base import Work
from atoll.group.period import PeriodReport
from atoll.island.peer_failure import is_peer_failure
from atoll.strategies.base import Outer, extend_history_hash
from atoll.strategies.inner import gather_scatter, sharded_optimizer
from atoll.strategies.inner.gradient_norm import GradientNorm
from atoll.strategies.inner.sharded_optimizer import LocalShard
from atoll.strategies.inner.worker import Worker
from atoll.strategies.resolve import resolve
from atoll.train.state.committed import adopt
from atoll.train.state.saving import Saving
from tests.island.leading import Member, led, table
from tests.island.reference import Perceptron, batch_for

dist: Any = torch.distributed

NAME, EVERY, RANKS = "perceptron", 2, 4
SQUARE = {"replicate": 2, "shard": 2}
ROWS = 8
ENDED, LOST, FAILED = 0, 3, 4
"""Exit statuses of ranks: after all went well, because others were gone, for another reason."""

STARTING = ("meeting", "building", "recovering")
"""Moments before the first step of an island that has to take the others' state over."""
BEFORE = ("forward", "backward", "reducing", "measuring", "stepping", "pulling")
"""Moments before the island has told the others what it has."""
AFTER = ("pushing", "saving")
"""Moments after the round."""


@dataclass(frozen=True)
class Start:
    """What a new island is told."""

    port: int
    hub: str
    """Where the first rank finds the test."""
    key: bytes
    folder: Path
    late: bool
    moment: str = ""
    """When one dies; empty: never."""
    victim: int = -1


# --------------------------------------------------------------------------------- the nursery


def nursery(pipe: Connection) -> None:
    """Fork islands as they are asked for; tell their processes, and how these ended."""
    os.setsid()
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # fully_shard would, a second of work in every rank
    gc.freeze()  # else every rank copies what collecting garbage looks at
    while True:
        try:
            start: Start = pipe.recv()
        except EOFError:
            os._exit(0)
        met, tell = os.pipe()
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                pipe.close()
                _be_a_rank(start, rank, tell)
            children.append(child)
        os.close(tell)
        pipe.send(children)
        with os.fdopen(met, "rb") as all_have:
            if start.moment != "meeting":
                together = len(all_have.read()) == RANKS  # until each has met the others or ended
                pipe.send(together)
                if not together:
                    for child in children:
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
                    continue
        for _ in children:
            child, status = os.wait()
            pipe.send((child, os.waitstatus_to_exitcode(status)))


def _be_a_rank(start: Start, rank: int, tell: int) -> None:
    try:
        if start.victim == rank:
            _arrange(start.moment)
        torch.set_num_threads(1)  # before threads compute, see `pool.py`
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{start.port}", rank=rank, world_size=RANKS,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        os.write(tell, b"m")
        os.close(tell)
        led(lambda member: _live(member, start), NAME, table(steps=10_000), SQUARE)
    except BaseException as error:
        if not is_peer_failure(error):
            traceback.print_exc()
        os._exit(LOST if is_peer_failure(error) else FAILED)
    os._exit(ENDED)


# ------------------------------------------------------------------------------ a life as a member


def diloco(member: Member, group: Any) -> Outer:
    options = {"every": EVERY, "shared_steps": 0}
    outer = resolve(StrategyTable(outer="diloco", codec="fp32", options=options)).build()
    outer.setup(member.task, group=group, codec=make_codec("fp32"))
    member.outer = outer
    return outer


def period(member: Member) -> tuple[str, ...]:
    """Train up to a round and through it; return who took part."""
    while True:
        batch = batch_for(member.task.model, rows=ROWS, seed=member.task.step + 1)
        done = member.inner.step(member.task, batch, member.outer)
        if done.sync is not None:
            return tuple(done.sync.contributors)


def _live(member: Member, start: Start) -> None:
    """Be a member until the group stops: take the state over, train, save after every round."""
    pipe = Client(start.hub, authkey=start.key)
    group, task = FarGroup(pipe), member.task
    outer = diloco(member, group)
    if start.late:
        group.ask("recover")
        shared, inner = group.ask("state")
        adopt(task, outer, shared=shared, inner=inner)
        group.ask("standing", task.round, base=outer.committed(task).base)
    else:
        extend_history_hash(task, outer.begin(task))
    saving = Saving(DirectoryStore(start.folder))
    while not group.stopping:
        period(member)
        saving.save(task, outer, Extras("diloco"), members=group.members, final=False)
        group.ask("told", task.round, outer.committed(task).base)


class FarGroup:
    """A member's group that is in another process."""

    me = "w0"
    leaving = False
    sent_bytes = received_bytes = 0
    upload_s: float | None = None

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.aggregation = Aggregation()
        self.members: tuple[str, ...] = ()
        self.epoch = self.committed_round = 0
        self.stopping = False
        self.ask("register")

    def ask(self, verb: str, *given: Any, **named: Any) -> Any:
        self._pipe.send((verb, given, named))
        value, error, seen = self._pipe.recv()
        for name, known in seen.items():
            setattr(self, name, known)
        if error is not None:
            raise error
        return value

    def announce(self, report: PeriodReport) -> None:
        self.ask("announce", report)

    def join(self, round_: int, **named: Any) -> Any:
        return self.ask("join", round_, **{**named, "deadline": None})

    def reduce(self, tensors: Any, **named: Any) -> Any:
        return Work.of(self.ask("reduce", list(tensors), **named))

    def commit(
        self, reduced: Any, *, resting: Callable[[], AbstractContextManager[None]] = nullcontext,
        **named: Any,
    ) -> Any:  # fmt: skip
        with resting():
            return self.ask("commit", reduced, **named)


# --------------------------------------------------------------------------------------- moments


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arrange(moment: str) -> None:
    """Let this process die when it comes to a moment: those of training after a first step."""
    steps, pushes = _count("step"), _count("push")
    if moment == "meeting":
        _die()
    if moment == "backward":
        _in_backward(due=lambda: next(steps) > 0)
        return
    places: Mapping[str, list[tuple[Any, str]]] = {
        "building": [(GradientNorm, "__init__")],
        "recovering": [(Worker, "push")],
        "forward": [(Perceptron, "criterion")],
        "reducing": [(param_group, "foreach_reduce")],
        "measuring": [(GradientNorm, "measure")],
        "stepping": [(LocalShard, "step")],
        "pulling": [(gather_scatter, "whole_of")],
        "pushing": [(Worker, "push")],
        "saving": [
            (sharded_optimizer.OptimizerState, name) for name in ("gather", "outline", "fetch")
        ],
    }
    times = itertools.count(1)
    due: Callable[[], bool] = lambda: next(steps) > 0  # noqa: E731
    if moment == "building":
        due = lambda: True  # noqa: E731
    elif moment == "recovering":  # the second push: the first one is that of a fresh host model
        due = lambda: next(pushes) > 0  # noqa: E731
    elif moment == "pulling":  # half way through the model
        due = lambda: next(steps) > 0 and next(times) == 3  # noqa: E731
    for owner, name in places.get(moment, []):
        _before(owner, name, due=due)


def _before(owner: Any, name: str, *, due: Callable[[], bool]) -> None:
    original = getattr(owner, name)

    def dying(*given: Any, **named: Any) -> Any:
        if due():
            _die()
        return original(*given, **named)

    setattr(owner, name, dying)


def _count(verb: str) -> Iterator[int]:
    """Yield how often the ranks have done something, whenever it is asked."""
    original, done = getattr(Worker, verb), [0]

    def counted(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        done[0] += 1
        return found

    setattr(Worker, verb, counted)
    return iter(lambda: done[0], None)


def _in_backward(*, due: Callable[[], bool]) -> None:
    original = Perceptron.criterion

    def steep(self: Any, outputs: Any, targets: Any) -> Any:
        if due() and outputs.requires_grad:
            outputs.register_hook(lambda _: _die())
        return original(self, outputs, targets)

    Perceptron.criterion = steep  # type: ignore[method-assign]
