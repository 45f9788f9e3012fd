"""Orders that move surviving ranks to another mesh: a supervisor writes, a rank reads them.

An order is a line of JSON on the rank's standard input. A rank that loses another one keeps its
process, with everything loaded, and takes its next place from there. A planned order comes while
all is well: rank 0 then stops after a round, and the other ranks with it. Ranks of islands that do
not change their mesh have an empty input, and end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from atoll.config import RankPlace
from atoll.island.peer_failure import is_peer_failure

ORDER_S = 90.0
"""How long a rank waits for an order; a supervisor may wait for machines that come back."""


class MorphOrder(msgspec.Struct, frozen=True):
    """The next place of a surviving rank."""

    number: int
    """Number of the island's start; it increases with every start."""
    place: RankPlace
    spec: str
    """Path of the job file of the new mesh."""
    planned: bool = False
    """No rank was lost: the ranks go on after their round."""

    @property
    def job_file(self) -> Path:
        """Path of the job file."""
        return Path(self.spec)


class Moved(Exception):
    """Ends training after a round, with its state stored, so that the ranks take other places."""

    def __init__(self, order: MorphOrder, *, round_: int) -> None:
        """Go on by an order, from the stored state of a round."""
        super().__init__(f"order {order.number}")
        self.order, self.round = order, round_


def give_order(rank: IO[bytes], order: MorphOrder) -> None:
    """Write an order to the input of a rank; a rank that has just died is no error."""
    with suppress(OSError, ValueError):
        rank.write(msgspec.json.encode(order) + b"\n")
        rank.flush()


class Orders:
    """The orders that this process has received; a background thread reads them."""

    def __init__(self, descriptor: int = 0) -> None:
        """Read a file descriptor: the standard input."""
        self._changed = threading.Condition()
        self._pending: list[MorphOrder] = []
        self._over = False
        threading.Thread(target=self._read, args=(descriptor,), name="orders", daemon=True).start()

    @property
    def newest(self) -> MorphOrder | None:
        """The newest order that was not taken; None: there is none."""
        with self._changed:
            return self._pending[-1] if self._pending else None

    def take(self, number: int) -> MorphOrder | None:
        """Wait for the order of a start, and remove it and earlier ones; None: it has not come."""
        return self._await(lambda order: order.number == number)

    def after(self, error: BaseException) -> MorphOrder | None:
        """Return the order that follows the loss of another rank; None: there is none.

        `error` ended this rank's work; if it is a failure of this rank itself, there is no order.
        """
        if not is_peer_failure(error):
            return None
        return self._await(lambda order: not order.planned)

    def _await(self, wanted: Callable[[MorphOrder], bool]) -> MorphOrder | None:
        deadline = time.monotonic() + ORDER_S
        with self._changed:
            while True:
                found = [order for order in self._pending if wanted(order)]
                if found:
                    self._pending = [o for o in self._pending if o.number > found[-1].number]
                    return found[-1]
                left_s = deadline - time.monotonic()
                if self._over or left_s <= 0:
                    return None
                self._changed.wait(left_s)

    def _read(self, descriptor: int) -> None:
        with suppress(OSError), open(descriptor, "rb", buffering=0, closefd=False) as lines:
            # Unbuffered: the interpreter cannot exit while a waiting thread holds a buffer's lock.
            while line := lines.readline():
                with suppress(msgspec.DecodeError), self._changed:
                    self._pending.append(msgspec.json.decode(line, type=MorphOrder))
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()
