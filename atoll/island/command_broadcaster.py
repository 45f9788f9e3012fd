"""Commands of an island's rank 0 to all ranks, one at a time.

Only the first rank is a member of the job: it holds the session with the hub, the data, the
schedule and the outer strategy. The others serve it: a command names a verb and carries values and
tensors; every rank, the first included, runs its own handler of that verb, and inside handlers the
ranks meet in collectives as in any program of torch.distributed. So what only rank 0 knows
(a round is over, the job stops) reaches all ranks at the same point of the program.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed
from torch import Tensor

from atoll.errors import WireError
from atoll.island.start_phase import StartReport

log = logging.getLogger(__name__)

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""

ROOM_BYTES, MOST_ROOM_BYTES = 4096, 1 << 17
"""Commands up to this length need one broadcast; after longer ones there is more room, up to this:
steps are all alike, so each takes one."""
INSIDE_BYTES = 1 << 20
"""Tensors up to this length together are in the command; longer ones have their own broadcasts."""
SIZES_BYTES = 16
"""Before a command: its length, and that of what is not tensors."""
END = "end"
PATIENCE_DAYS = 30
"""How long a rank waits for a command: a job may be paused. One that dies is noticed otherwise."""

LET_GO_S, LOOK_S = 10.0, 0.001
"""How long Gloo may hold what was exchanged last, and the pause between two looks."""

Handler = Callable[..., Any]
"""Called with the command's tensors in order, and its values by name."""


class _Command(msgspec.Struct, frozen=True, array_like=True):
    verb: str
    values: dict[str, Any]
    dtypes: list[str]
    shapes: list[list[int]]


class CommandBroadcaster:
    """The ranks of an island; the same object on each of them.

    Not thread-safe: commands are given from the thread that trains.
    """

    def __init__(self, *, rank: int, ranks: int, start: StartReport | None = None) -> None:
        """Be one rank; the default process group must be there. Collective.

        A group of its own carries commands, so that they never mix with what handlers send.

        Args:
            rank: This one.
            ranks: Of the island.
            start: Where handlers report how far this rank has come at its start.
        """
        self.rank, self.ranks = rank, ranks
        self.start = start or StartReport()
        patience = timedelta(days=PATIENCE_DAYS)
        self._group = dist.new_group(backend="gloo", timeout=patience) if ranks > 1 else None
        self._room = ROOM_BYTES
        self._handlers: dict[str, Handler] = {}
        self.ended = False
        self.broken = False
        """A command failed in the middle: what the other ranks are doing is unknown."""

    @property
    def leads(self) -> bool:
        """Whether this is the rank that commands."""
        return self.rank == 0

    def on(self, verb: str, handler: Handler) -> None:
        """Set what this rank does at a command; every rank sets the same verbs."""
        self._handlers[verb] = handler

    def call(self, verb: str, tensors: Sequence[Tensor] = (), **values: Any) -> Any:
        """Let every rank do a command; return what this rank's own handler returns.

        Args:
            verb: What to do.
            tensors: What goes along, on any device; others get them in main memory.
            values: Further arguments: whatever msgpack carries.
        """
        if self.ended:
            raise WireError("the island has ended already", given=verb)
        if self.broken:
            raise WireError(
                "an earlier command failed in the middle: the ranks are no longer in step",
                given=verb, remedy="start the island anew",
            )  # fmt: skip
        self.broken = True
        if self._group is not None:
            self._send(verb, tensors, values)
        found = self._handlers[verb](*tensors, **values)
        self.broken = False
        return found

    def serve(self) -> None:
        """Do what rank 0 commands until it ends the island."""
        while True:
            verb, tensors, values = self._receive()
            if verb == END:
                self.ended = True
                return
            self._handlers[verb](*tensors, **values)

    def end(self) -> None:
        """Let the other ranks return from `serve`, if they listen; further calls do nothing."""
        if self._group is not None and not self.ended and not self.broken:
            self._send(END, (), {})
        self.ended = True

    def gather(self, row: Tensor) -> Tensor:
        """Return every rank's row, (n,) -> (ranks, n); all ranks call it at one point, no command.

        Args:
            row: As long, and of the same type, on every rank; in main memory.
        """
        rows = [torch.empty_like(row) for _ in range(self.ranks)]
        if self._group is None:
            return row[None]
        dist.all_gather(rows, row.contiguous(), group=self._group)
        return torch.stack(rows)

    def part(self) -> None:
        """Meet the other ranks a last time: every rank calls it. Returns when Gloo is through.

        So no connection closes while another rank still reads. And Gloo's threads release their
        Python objects here: during the interpreter's shutdown they would abort the process.
        """
        held = [torch.zeros(1) for _ in range(self.ranks + 1)]
        if self._group is not None:
            dist.all_gather(held[1:], held[0], group=self._group)
        watched = [weakref.ref(tensor) for tensor in held]
        del held
        deadline = time.monotonic() + LET_GO_S
        while any(watch() is not None for watch in watched):
            if time.monotonic() > deadline:
                log.warning("Gloo still holds what was exchanged last, after %.0f s", LET_GO_S)
                return
            time.sleep(LOOK_S)  # gives the interpreter's lock to those threads

    # ------------------------------------------------------------------------- commands

    def _send(self, verb: str, tensors: Sequence[Tensor], values: Mapping[str, Any]) -> None:
        given = [t.detach().cpu().contiguous() for t in tensors]
        dtypes = [str(t.dtype).removeprefix("torch.") for t in given]
        command = _Command(verb, dict(values), dtypes, [list(t.shape) for t in given])
        head = bytearray(msgspec.msgpack.encode(command))
        inside = sum(t.nbytes for t in given) <= INSIDE_BYTES
        pieces = [torch.frombuffer(head, dtype=torch.uint8)]
        if inside:
            pieces += [t.reshape(-1).view(torch.uint8) for t in given if t.numel()]
        total = SIZES_BYTES + sum(piece.numel() for piece in pieces)
        message = torch.zeros(max(total, self._room), dtype=torch.uint8)
        message[:SIZES_BYTES] = torch.tensor([total, len(head)]).view(torch.uint8)
        torch.cat(pieces, out=message[SIZES_BYTES:total])
        self._broadcast(message[: self._room])
        if total > self._room:
            self._broadcast(message[self._room :])
            self._room = _room_for(total)
        if not inside:
            for tensor in given:
                if tensor.numel():
                    self._broadcast(tensor)

    def _receive(self) -> tuple[str, list[Tensor], dict[str, Any]]:
        message = torch.empty(self._room, dtype=torch.uint8)
        self._broadcast(message)
        total, size = message[:SIZES_BYTES].view(torch.int64).tolist()
        if total > self._room:
            rest = torch.empty(total - self._room, dtype=torch.uint8)
            self._broadcast(rest)
            message = torch.cat([message, rest])
            self._room = _room_for(total)
        at = SIZES_BYTES + size
        head = bytes(message[SIZES_BYTES:at].numpy().data)
        command = msgspec.msgpack.decode(head, type=_Command)
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(command.shapes, command.dtypes, strict=True)
        ]
        inside = sum(t.nbytes for t in tensors) <= INSIDE_BYTES
        for tensor in tensors:
            if tensor.numel() and inside:
                tensor.view(-1).view(torch.uint8).copy_(message[at : at + tensor.nbytes])
                at += tensor.nbytes
            elif tensor.numel():
                self._broadcast(tensor)
        return command.verb, tensors, command.values

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self._group)


def _room_for(total: int) -> int:
    """Return how long the first broadcast is after a command of a length: the same on all ranks."""
    return min(MOST_ROOM_BYTES, 1 << (total - 1).bit_length())
