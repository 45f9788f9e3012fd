"""Commands of an island's rank 0, the only member of the job, to all ranks.

A command names a verb and carries values and tensors; every rank, including rank 0, runs its own
handler of that verb, and handlers may use collectives. So what only rank 0 knows (a round is over,
the job stops) reaches all ranks at the same point of the program.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
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
"""Untyped, because torch's stubs omit most of what is used here."""

ROOM_BYTES, MOST_ROOM_BYTES = 4096, 1 << 17
"""Initial and maximum size of the first broadcast. A longer command grows it, so that repeated
commands of the same size need one broadcast each.
"""
INSIDE_BYTES = 1 << 20
"""Tensors up to this total are sent inside the command; larger ones in their own broadcasts."""
SIZES_BYTES = 16
"""Header of a command: its length, and the length without tensors."""
MOST_UNDER_WAY = 64
"""Tensors that rank 0 sends ahead of other ranks."""
END = "end"
PATIENCE_DAYS = 30
"""Timeout for the next command, because a job may be paused. Dead ranks are detected otherwise."""

LET_GO_S, LOOK_S = 10.0, 0.001
"""Timeout and polling interval for Gloo to release the last tensors."""

Handler = Callable[..., Any]


class _Command(msgspec.Struct, frozen=True, array_like=True):
    verb: str
    values: dict[str, Any]
    dtypes: list[str]
    shapes: list[list[int]]


class CommandBroadcaster:
    """The ranks of an island, one instance on each; used from the training thread only."""

    def __init__(self, *, rank: int, ranks: int, start: StartReport | None = None) -> None:
        """Create a process group for commands (collective), separate from handlers' traffic."""
        self.rank, self.ranks = rank, ranks
        self.start = start or StartReport()
        patience = timedelta(days=PATIENCE_DAYS)
        self._group = dist.new_group(backend="gloo", timeout=patience) if ranks > 1 else None
        self._room = ROOM_BYTES
        self._handlers: dict[str, Handler] = {}
        self._ahead: set[str] = set()
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        """Broadcasts that may not be complete, oldest first."""
        self.ended = False
        self.next_start: int | None = None
        """Number of the start of the island in which the ranks go on; None: they end."""
        self.broken = False
        """A command failed midway, so the state of the other ranks is unknown."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def on(self, verb: str, handler: Handler, *, ahead: bool = False) -> None:
        """Set this rank's handler of a command; every rank sets the same verbs.

        With `ahead` rank 0 does not wait until other ranks are ready for the command, and they
        receive the next one while they run it: its handler MUST NOT use `gather`.
        """
        self._handlers[verb] = handler
        if ahead:
            self._ahead.add(verb)

    def call(self, verb: str, tensors: Sequence[Tensor] = (), **values: Any) -> Any:
        """Run a command on every rank; return the result of this rank's handler.

        Tensors may be on any device; other ranks receive them in main memory. Values are sent by
        msgpack.
        """
        if self.ended:
            raise WireError("the island has ended already", given=verb)
        if self.broken:
            raise WireError(
                "an earlier command failed midway: the ranks are no longer in step",
                given=verb, remedy="restart the island",
            )  # fmt: skip
        self.broken = True
        if self._group is not None:
            self._send(verb, tensors, values)
        found = self._handlers[verb](*tensors, **values)
        self.broken = False
        return found

    def serve(self) -> None:
        """Run the commands of rank 0 until it ends the island."""
        posted = self._post()
        while True:
            verb, tensors, values = self._receive(posted)
            if verb == END:
                self.ended, self.next_start = True, values.get("next_start")
                if self.next_start is not None:
                    self.part()
                return
            if verb in self._ahead:
                posted = self._post()
                self._handlers[verb](*tensors, **values)
                continue
            self._handlers[verb](*tensors, **values)
            posted = self._post()

    def end(self, next_start: int | None = None) -> None:
        """Make the other ranks return from `serve`; further calls have no effect.

        `next_start` is the number of the start in which they go on.
        """
        if self._group is not None and not self.ended and not self.broken:
            self._send(END, (), {} if next_start is None else {"next_start": next_start})
            if next_start is not None:
                self.part()
        self.ended, self.next_start = True, next_start

    def gather(self, row: Tensor) -> Tensor:
        """All-gather rows of equal length and dtype in main memory, (n,) -> (ranks, n)."""
        rows = [torch.empty_like(row) for _ in range(self.ranks)]
        if self._group is None:
            return row[None]
        dist.all_gather(rows, row.contiguous(), group=self._group)
        return torch.stack(rows)

    def part(self) -> None:
        """Synchronize with the other ranks a last time (collective) and wait until Gloo is idle.

        Otherwise a connection may close while another rank reads, or Gloo's threads release Python
        objects during interpreter shutdown, which aborts the process.
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
            time.sleep(LOOK_S)  # releases the GIL to those threads

    # ---------------------------------------------------------------------------- transport

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
        self._wait(MOST_UNDER_WAY if verb in self._ahead else 0)

    def _post(self) -> Tensor:
        """Be ready for the next command, without waiting for it."""
        message = torch.empty(self._room, dtype=torch.uint8)
        self._broadcast(message)
        return message

    def _receive(self, message: Tensor) -> tuple[str, list[Tensor], dict[str, Any]]:
        self._wait()
        total, size = message[:SIZES_BYTES].view(torch.int64).tolist()
        if total > self._room:
            rest = torch.empty(total - self._room, dtype=torch.uint8)
            self._broadcast(rest)
            self._wait()
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
        self._wait()
        return command.verb, tensors, command.values

    def _broadcast(self, tensor: Tensor) -> None:
        work = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        self._under_way.append((work, tensor))

    def _wait(self, most: int = 0) -> None:
        """Wait until at most so many broadcasts are under way."""
        while len(self._under_way) > most:
            self._under_way.popleft()[0].wait()


def _room_for(total: int) -> int:
    """Return the size of the first broadcast after a command of this length, equal on all ranks."""
    return min(MOST_ROOM_BYTES, 1 << (total - 1).bit_length())
