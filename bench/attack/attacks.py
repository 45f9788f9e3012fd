"""What an attack is: a function that tries to break one promise, and the verdict on it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from bench.attack.site import Site

Verdict = Literal["held", "broken", "not tried", "failed"]
"""`failed`: the attack itself could not be carried out to its end, so it says nothing."""


class BrokenPromise(Exception):
    """A promise did not hold."""


class NotTried(Exception):
    """The attack cannot be tried here, for this reason."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    attack: str
    promise: str
    verdict: Verdict
    seen: str
    """What happened, or why it was not tried."""
    seconds: float


@dataclass(frozen=True)
class Attack:
    """One attack."""

    name: str
    promise: str
    run: Callable[[Site], str]
    """Returns what it saw; raises `BrokenPromise` or `NotTried`."""
    quick: bool

    def tried(self, site: Site) -> Row:
        """Carry it out and return the verdict."""
        began = time.monotonic()
        try:
            verdict: Verdict = "held"
            seen = self.run(site)
        except BrokenPromise as error:
            verdict, seen = "broken", str(error)
        except NotTried as error:
            verdict, seen = "not tried", str(error)
        except Exception as error:  # the others are tried nevertheless
            verdict, seen = "failed", f"{type(error).__name__}: {error}"
            traceback.print_exc()
        return Row(self.name, self.promise, verdict, seen, time.monotonic() - began)


class Suite:
    """The attacks of one file, in order."""

    def __init__(self) -> None:
        self._attacks: list[Attack] = []

    def attack(
        self, promise: str, *, quick: bool = True
    ) -> Callable[[Callable[[Site], str]], Callable[[Site], str]]:
        """Add a function; `promise` is what it tries to break, `quick`: also with `--quick`."""

        def add(run: Callable[[Site], str]) -> Callable[[Site], str]:
            name = run.__name__.replace("_", " ")
            self._attacks.append(Attack(name, promise, run, quick))
            return run

        return add

    def __iter__(self) -> Iterator[Attack]:
        return iter(self._attacks)


def hold(condition: object, otherwise: str) -> None:
    """Raise BrokenPromise unless the condition holds."""
    if not condition:
        raise BrokenPromise(otherwise)
