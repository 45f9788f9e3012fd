"""The schedule of Streaming DiLoCo: which fragment is averaged at which step; pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.errors import ConfigError


class StreamingPlan:
    """Steps at which rounds begin, counted by the step common to all members.

    Legend: H steps between two rounds of a fragment, F fragments, tau steps until a result is
    applied. Fragment p first begins at (p + 1) H / F, rounded down, then every H steps.
    """

    def __init__(self, *, every: int, count: int, delay: int, since: int, staggered: bool) -> None:
        """Count from step `since`; without `staggered` all fragments begin with the last one.

        Raises:
            ConfigError: a number is out of range, or a result would come after the next round.
        """
        least = {"every": (every, 1), "fragments": (count, 1), "delay": (delay, 0)}
        for name, (given, smallest) in {**least, "shared_steps": (since, 0)}.items():
            if given < smallest:
                raise ConfigError(
                    f"{name} is too small", given=given, expected=f"{smallest} or more"
                )
        gap = every // count if staggered else every
        if delay >= gap:
            raise ConfigError(
                "a round's result would be taken after the next one has to begin",
                given=f"delay = {delay}, every = {every}, fragments = {count}",
                expected=f"delay below every / fragments, {gap} here",
                remedy=f"delay = {gap - 1}" if gap else f"fragments = {every} or fewer",
            )
        self._every, self._since = every, since
        self._offsets = [(p + 1) * every // count if staggered else every for p in range(count)]

    def next_due(self, step: int) -> int:
        """Return the first step after `step` at which a round begins, or the shared start ends."""
        if step < self._since:
            return self._since
        begun = step - self._since
        cycle = begun // self._every * self._every
        ahead = [cycle + turn + o for o in self._offsets for turn in (0, self._every)]
        return self._since + min(when for when in ahead if when > begun)

    def due_at(self, step: int) -> list[int]:
        """Return the fragments whose round begins at a step."""
        begun = step - self._since
        return [p for p, o in enumerate(self._offsets) if (begun - o) % self._every == 0]

    def rounds(self, steps: int) -> Iterator[list[int]]:
        """Yield the fragments of every round in a run of `steps`, including the last round."""
        newest = dict.fromkeys(range(len(self._offsets)), min(self._since, steps))
        step = self.next_due(self._since) if steps >= self._since else steps + 1
        while step <= steps:
            which = self.due_at(step)
            yield which
            newest |= dict.fromkeys(which, step)
            step = self.next_due(step)
        rest = [p for p, when in newest.items() if when < steps]
        if steps < self._since:
            rest = list(newest)
        if rest:
            yield rest
