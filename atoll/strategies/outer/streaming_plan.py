"""The schedule of Streaming DiLoCo: which fragment is averaged at which step; pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.errors import ConfigError


class StreamingPlan:
    """Steps at which rounds begin, counted by the step common to all members.

    Legend: H steps between two rounds of a fragment, F fragments, tau steps until a result is
    applied. Fragment p first begins at (p + 1) H / F, rounded down, then every H steps.

    The last round, after the last step T, averages all fragments that were trained since. Where T
    is known, no round begins that would not be over before: the last one averages that, too.
    """

    def __init__(
        self, *, every: int, count: int, delay: int | str, since: int, staggered: bool
    ) -> None:
        """Count from step `since`; without `staggered` all fragments begin with the last one.

        With `delay = "auto"` it is :attr:`delay` that changes, by :meth:`learn`. Before the first
        measured round it is half of the steps between two rounds, or N with `auto:N`, as the
        planner writes it.

        Raises:
            ConfigError: a number is out of range, or a result would come after the next round.
        """
        self.measured = isinstance(delay, str)
        """Whether the delay follows from measured times."""
        gap = every // count if staggered and count > 0 else every
        if isinstance(delay, str):
            delay = min(max(0, gap - 1), _first(delay, otherwise=max(0, gap // 2)))
        least = {"every": (every, 1), "fragments": (count, 1), "delay": (delay, 0)}
        for name, (given, smallest) in {**least, "shared_steps": (since, 0)}.items():
            if given < smallest:
                raise ConfigError(
                    f"{name} is too small", given=given, expected=f"{smallest} or more"
                )
        if delay >= gap:
            raise ConfigError(
                "a round's result would be taken after the next one has to begin",
                given=f"delay = {delay}, every = {every}, fragments = {count}",
                expected=f"delay below every / fragments, {gap} here",
                remedy=f"delay = {gap - 1}" if gap else f"fragments = {every} or fewer",
            )
        self._every, self._since, self._longest = every, since, gap - 1
        self.delay = delay
        """Steps between a round's begin and applying its result (tau)."""
        self.last = 0
        """The last step of the run (T); 0: unknown."""
        self._offsets = [(p + 1) * every // count if staggered else every for p in range(count)]

    def learn(self, steps: int) -> None:
        """Take the steps that hide a round, equal on all members, for the rounds to come."""
        if self.measured and steps > 0:
            self.delay = min(steps, self._longest)

    def next_due(self, step: int) -> int:
        """Return the first step after `step` at which a round begins, or the shared start ends."""
        if step < self._since:
            return self._since
        due = self._turn_after(step)
        if not self.last or due + self.delay < self.last:
            return due
        return due if due > self.last else self._turn_after(self.last)

    def due_at(self, step: int) -> list[int]:
        """Return the fragments whose round begins at a step: those whose turn is then, or next."""
        begun = self._turn_after(step - 1) - self._since
        return [p for p, o in enumerate(self._offsets) if (begun - o) % self._every == 0]

    def _turn_after(self, step: int) -> int:
        begun = step - self._since
        cycle = begun // self._every * self._every
        ahead = [cycle + turn + o for o in self._offsets for turn in (0, self._every)]
        return self._since + min(when for when in ahead if when > begun)

    def rounds(self, steps: int) -> Iterator[list[int]]:
        """Yield the fragments of every round in a run of `steps`, including the last round."""
        newest = dict.fromkeys(range(len(self._offsets)), min(self._since, steps))
        step = self.next_due(self._since) if steps >= self._since else steps + 1
        while step <= steps:
            which = self.due_at(step)
            yield which
            newest |= dict.fromkeys(which, step)
            step = self.next_due(step + self.delay)
        rest = [p for p, when in newest.items() if when < steps]
        if steps < self._since:
            rest = list(newest)
        if rest:
            yield rest


def _first(text: str, *, otherwise: int) -> int:
    """Return the delay that `auto` or `auto:N` begins with; raises ConfigError."""
    word, colon, number = text.partition(":")
    if word != "auto" or (colon and not (number.isascii() and number.isdigit())):
        raise ConfigError(
            "unknown delay", given=repr(text), expected='steps, "auto", or "auto:N" with a number',
            remedy='delay = "auto"',
        )  # fmt: skip
    return int(number) if colon else otherwise
