"""Sharding as a job that several members share: features in a queue, results in a topic.

    queue reader-todo   one item: a member trains the small model
    topic reader        its weights
    queue NAME-parts    a range of documents each; leased, so a lost member's part is done again
    topic NAME-done     the features of a part each; durable, so nothing is computed a second time
    topic NAME-merged   one entry: a member has merged them

Every member that runs helps. A member that is killed loses its current part only; the merge is an
item of the queue as well, so exactly one member at a time does it, and another if that one is
killed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from atoll.checkpoint import Weights
from atoll.data import Dataset
from atoll.errors import LeaseEnded
from atoll.ids import new_token
from atoll.queues import Item, Queue, Topic
from atoll.routing.features import Features
from atoll.routing.parts import Work, part_name
from atoll.routing.reader import STEPS, train_reader, weights_of

LEASE_S = 120.0
"""Of a part: much longer than computing one takes."""

WAIT_S = 2.0
MERGE = "merge"
KEEP_S = 7 * 86_400.0


class Lines(Protocol):
    """What a member of a job has: `atoll.Run`."""

    def queue(self, name: str, **options: object) -> Queue:
        """Return a queue of the job."""
        ...

    def topic(self, name: str, **options: object) -> Topic:
        """Return a topic of the job."""
        ...

    @property
    def member(self) -> str:
        """The member's name."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether the member was asked to stop."""
        ...


def train_reader_once(
    lines: Lines, dataset: Dataset, *, seed: int, steps: int = STEPS, lease_s: float = LEASE_S
) -> Weights | None:
    """Return the small model that one of the members trains; every member calls this.

    Another one trains it if that member is killed.

    Args:
        lines: The member's queues and topics.
        dataset: What to train on, the same on every member.
        seed: Of the training.
        steps: Of the training.
        lease_s: How long after a member's end another one starts, extended while it trains.

    Returns:
        Weights, or None if the member was asked to stop before.
    """
    name = f"reader-{dataset.digest[:16]}-{seed}-{steps}"
    todo = lines.queue(f"{name}-todo", max_attempts=1000)
    made = lines.topic(name, max_items=16, keep_s=KEEP_S)
    results = made.subscribe(f"{lines.member} {new_token()}", start="oldest")
    if not (found := results.read(1)):
        todo.put([], key=name)
    while not found and not lines.stopping:
        for item in todo.claim(lease_s=lease_s):
            weights = _trained(item, lines, dataset, (seed, steps), lease_s)
            if weights is None:
                return None
            made.publish(weights.state, key=name)
            with contextlib.suppress(LeaseEnded):
                item.ack()
        found = results.read(1, wait_s=WAIT_S)
    return weights_of(found[0].value, dataset.tokenizer) if found else None


def _trained(
    item: Item, lines: Lines, dataset: Dataset, how: tuple[int, int], lease_s: float
) -> Weights | None:
    """Train the small model while holding its item; give it back when asked to stop."""
    extended = time.monotonic()

    def go_on(step: int, steps: int) -> bool:
        nonlocal extended
        if time.monotonic() - extended > lease_s / 4:
            # After a computer slept another one trains the same model: the first result counts.
            with contextlib.suppress(LeaseEnded):
                item.extend(lease_s)
            extended = time.monotonic()
        return not lines.stopping

    weights = train_reader(dataset, seed=how[0], steps=how[1], progress=go_on)
    if weights is None:
        item.release("asked to stop")
    return weights


def compute_together(
    lines: Lines,
    work: Work,
    merge: Callable[[Features], None],
    *,
    lease_s: float = LEASE_S,
    progress: Callable[[int, int], None] = lambda done, parts: None,
) -> bool:
    """Help until all features are computed and merged; every member calls this.

    Args:
        lines: The member's queues and topics.
        work: What to compute, the same on every member.
        merge: Called with the features of all documents by one member at a time. It may be called
            again if a member is killed while it merges, so it MUST be repeatable.
        lease_s: How long a part is a member's own; a lost member's part is done again after that.
        progress: Called with the number of finished and of all parts.

    Returns:
        Whether everything is merged; False if the member was asked to stop before.
    """
    helper = _Helper(lines, work, lease_s)
    helper.offer()
    while not lines.stopping:
        helper.read()
        progress(len(helper.found), len(helper.parts))
        if helper.merged():
            return True
        for item in helper.queue.claim(lease_s=lease_s, wait_s=WAIT_S):
            if item.key != helper.key(MERGE):
                helper.compute(item)
            elif helper.complete():
                merge(helper.features())
                helper.end.publish(True, key=helper.key(MERGE))
                with contextlib.suppress(LeaseEnded):
                    item.ack()
                return True
            else:
                helper.hold(item)
    return helper.merged()


class _Helper:
    """One member's view of the work."""

    def __init__(self, lines: Lines, work: Work, lease_s: float) -> None:
        self._lines, self._work = lines, work
        self._lease_s = lease_s
        self._name = work.name()
        self.parts = {self.key(part_name(part)): part for part in work.parts()}
        many = len(self.parts) + 1
        self.queue = lines.queue(f"{self._name}-parts", max_items=2 * many, max_attempts=1000)
        self.done = lines.topic(f"{self._name}-done", max_items=4 * many, keep_s=KEEP_S)
        self.end = lines.topic(f"{self._name}-merged", max_items=16, keep_s=KEEP_S)
        # A member that starts again reads everything again: it had it in memory only.
        once = f"{lines.member} {new_token()}"
        self._results = self.done.subscribe(once, start="oldest")
        self._ends = self.end.subscribe(once, start="oldest")
        self.found: dict[str, Features] = {}
        self._merged = False

    def key(self, part: str) -> str:
        """Return the key of an item or a result."""
        return f"{self._name}/{part}"

    def offer(self) -> None:
        """Put what is not done into the queue; keys make it harmless that all members do."""
        self.read()
        if self.merged():
            return
        for key, part in self.parts.items():
            if key not in self.found:
                self.queue.put([part.start, part.stop], key=key)
        self.queue.put([], key=self.key(MERGE))

    def read(self) -> None:
        """Take up what members have computed since."""
        while entries := self._results.read(100):
            for entry in entries:
                if entry.key in self.parts and entry.key not in self.found:
                    self.found[entry.key] = entry.value["features"]

    def merged(self) -> bool:
        """Return whether a member has merged everything."""
        self._merged = self._merged or bool(self._ends.read(1))
        return self._merged

    def complete(self) -> bool:
        """Return whether all parts are there."""
        return len(self.found) == len(self.parts)

    def compute(self, item: Item) -> None:
        """Compute a part, unless it is done already.

        A member that loses its lease computes the same as another one: the first result counts.
        """
        with contextlib.suppress(LeaseEnded), item:
            if item.key in self.parts and item.key not in self.found:
                self._publish(item.key)

    def hold(self, merging: Item) -> None:
        """Keep the merge while parts are missing, and help with them until asked to stop."""
        while not (self.complete() or self._lines.stopping):
            try:
                merging.extend(self._lease_s)
            except LeaseEnded:  # another one holds it
                return
            for item in self.queue.claim(lease_s=self._lease_s, wait_s=WAIT_S):
                self.compute(item)
            self.read()
        merging.release("all parts are there" if self.complete() else "asked to stop")

    def _publish(self, key: str) -> None:
        features = self._work.compute(self.parts[key])
        self.done.publish({"features": features}, key=key)

    def features(self) -> Features:
        """Return all features in the order of the documents."""
        return np.concatenate([np.asarray(self.found[key]) for key in self.parts])
