"""Ways to cheat, as a member's owner could patch them into the software of his own machine.

`patched` writes a folder for PYTHONPATH: what an agent with it starts is changed, nothing else is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORKER, CHECKER = "atoll.node.worker", "atoll.train.verification.child"

CHEATS = {"flip": WORKER, "data": WORKER, "accuse": CHECKER}
"""Cheat -> the program that does it: a member's own training, or its checks of others. All other
ways to cheat are tried in one process (`bench/audit/members.py`)."""

SITE = """
import sys
if {program!r} in sys.orig_argv:
    from tests.e2e.verification import cheats
    cheats.{cheat}()
"""


def patched(folder: Path, cheat: str) -> Path:
    """Return a folder whose modules make a machine cheat."""
    found = folder / f"patched-{cheat}"
    found.mkdir()
    (found / "sitecustomize.py").write_text(SITE.format(program=CHEATS[cheat], cheat=cheat))
    return found


def flip() -> None:
    """Send the negative of what was computed."""
    from atoll.strategies.outer.periodic import PeriodicOuter

    honest = PeriodicOuter.contribution

    def contribution(self: PeriodicOuter, task: Any) -> Any:
        delta, weight, norm = honest(self, task)
        return delta.neg_(), weight, norm

    PeriodicOuter.contribution = contribution  # type: ignore[method-assign]


def data() -> None:
    """Train on the first batch again and again, and say that it was the member's slot."""
    from atoll.train.batches import MemberStream

    honest, favourite = MemberStream.__next__, list[Any]()

    def following(self: MemberStream) -> Any:
        favourite.append(honest(self))
        return favourite[0]

    MemberStream.__next__ = following  # type: ignore[method-assign]


def accuse() -> None:
    """Compute the rounds of others with other data, so that every step after the first differs.

    All that the checker says later fits to it: only a judge can tell who is right.
    """
    data()
