"""Real process groups of a few members on threads, for tests of what they do together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from atoll.group.base import Work
from atoll.group.collectives.bounded_process_group import BoundedProcessGroup
from atoll.group.routes.direct import DirectGroup, DirectRoute
from atoll.group.routes.member_lines import MemberLines
from tests.patience import PATIENCE_S

T = TypeVar("T")


def direct_route(
    me: str, *, job: str = "job", address: str = "127.0.0.1", encrypted: bool = True
) -> DirectRoute:
    """Return the route of a member that has registered."""
    route = DirectRoute(address=address, job=job, me=me)
    route.trust(MemberLines(b"key of the job", me=me, encrypted=encrypted))
    return route


class Place:
    """n members that are connected by encrypted lines, or by Gloo."""

    def __init__(self, n: int) -> None:
        self.members = tuple(f"w{rank}" for rank in range(n))
        self.routes = [direct_route(member) for member in self.members]
        self._epoch = 0

    def run(
        self, work: Callable[[BoundedProcessGroup], T], *, timeout_s: float = PATIENCE_S
    ) -> list[T | BaseException]:
        """Do `work` on every member; errors take the place of results."""
        self._epoch += 1
        deadline = time.monotonic() + timeout_s
        meeting = DirectGroup(self._epoch, self.members, self.routes[0].dial, deadline)
        begun = [
            Work.start(
                lambda route=route: route.meet(meeting, work, serial=route.begin()),  # type: ignore[misc]
                name="member",
            )
            for route in self.routes
        ]
        results: list[T | BaseException] = []
        for each in begun:
            try:
                results.append(each.wait(timeout_s + 10))
            except BaseException as error:  # handed to the caller in place of the result
                results.append(error)
        return results

    def together(self, work: Callable[[BoundedProcessGroup], T]) -> list[T]:
        results: list[T] = []
        for result in self.run(work):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    def close(self) -> None:
        for route in self.routes:
            route.close()


@contextmanager
def places() -> Iterator[Callable[[int], Place]]:
    """Yield what returns a place for n members, the same one each time."""
    made: dict[int, Place] = {}

    def place(n: int) -> Place:
        if n not in made:
            made[n] = Place(n)
        return made[n]

    yield place
    for each in made.values():
        each.close()
