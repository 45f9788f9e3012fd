"""How the first rank of an island leads the others: one command at a time, done by all.

Only the first rank is a member of the job: it holds the session with the hub, the data, the
schedule and the outer strategy. The others serve it: a command names a verb and carries values and
tensors; every rank, the first included, runs its own handler of that verb, and inside handlers the
ranks meet in collectives as in any program of torch.distributed. So whatever only the first rank
can know (a round is over, the job stops) reaches all at the same point of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed
from torch import Tensor

from atoll.errors import WireError

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""

INLINE_BYTES = 4096
"""Commands up to this length need one broadcast; the tensors they carry have their own."""
END = "end"
PATIENCE_DAYS = 30
"""How long a rank waits for a command: a job may be paused. One that dies is noticed otherwise."""

Handler = Callable[..., Any]
"""Called with the command's tensors in order, and its values by name."""


class _Told(msgspec.Struct, frozen=True, array_like=True):
    verb: str
    values: dict[str, Any]
    dtypes: list[str]
    shapes: list[list[int]]


class Crew:
    """The ranks of an island; the same object on each of them.

    Not thread-safe: commands are given from the thread that trains.
    """

    def __init__(self, *, rank: int, ranks: int) -> None:
        """Be one rank; the default process group must be there. Collective.

        A group of its own carries commands, so that they never mix with what handlers send.
        """
        self.rank, self.ranks = rank, ranks
        patience = timedelta(days=PATIENCE_DAYS)
        self._group = dist.new_group(backend="gloo", timeout=patience) if ranks > 1 else None
        self._handlers: dict[str, Handler] = {}
        self.ended = False
        self.broken = False
        """A command failed in the middle: nobody knows what the others are doing."""

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
            raise WireError("the crew was sent home already", given=verb)
        if self.broken:
            raise WireError(
                "an earlier command failed in the middle: the ranks are no longer in step",
                given=verb, remedy="start the island anew",
            )  # fmt: skip
        self.broken = True
        if self._group is not None:
            self._tell(verb, tensors, values)
        found = self._handlers[verb](*tensors, **values)
        self.broken = False
        return found

    def serve(self) -> None:
        """Do what the first rank commands until it sends everybody home."""
        while True:
            verb, tensors, values = self._hear()
            if verb == END:
                self.ended = True
                return
            self._handlers[verb](*tensors, **values)

    def end(self) -> None:
        """Send the others home, if they listen; further calls do nothing."""
        if self._group is not None and not self.ended and not self.broken:
            self._tell(END, (), {})
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

    # ------------------------------------------------------------------------- commands

    def _tell(self, verb: str, tensors: Sequence[Tensor], values: Mapping[str, Any]) -> None:
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors]
        told = _Told(verb, dict(values), dtypes, [list(t.shape) for t in tensors])
        data = msgspec.msgpack.encode(told)
        first = torch.zeros(INLINE_BYTES, dtype=torch.uint8)
        first[:8] = torch.frombuffer(bytearray(len(data).to_bytes(8, "little")), dtype=torch.uint8)
        room = INLINE_BYTES - 8
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        first[8 : 8 + min(room, len(data))] = whole[:room]
        self._broadcast(first)
        if len(data) > room:
            self._broadcast(whole[room:].contiguous())
        for tensor in tensors:
            if tensor.numel():
                self._broadcast(tensor.detach().cpu().contiguous())

    def _hear(self) -> tuple[str, list[Tensor], dict[str, Any]]:
        first = torch.zeros(INLINE_BYTES, dtype=torch.uint8)
        self._broadcast(first)
        size = int.from_bytes(bytes(first[:8].tolist()), "little")
        data, room = bytes(first[8 : 8 + size].numpy().data), INLINE_BYTES - 8
        if size > room:
            rest = torch.zeros(size - room, dtype=torch.uint8)
            self._broadcast(rest)
            data += bytes(rest.numpy().data)
        told = msgspec.msgpack.decode(data, type=_Told)
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(told.shapes, told.dtypes, strict=True)
        ]
        for tensor in tensors:
            if tensor.numel():
                self._broadcast(tensor)
        return told.verb, tensors, told.values

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self._group)
