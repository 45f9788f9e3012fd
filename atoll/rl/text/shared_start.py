"""One member trains what all start from; the others take it from a topic."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from atoll.config import JobSpec
from atoll.queues import Topic
from atoll.rl.snapshots import decode_snapshot, encode_snapshot
from atoll.rl.state import load_module
from atoll.rl.text.start import Beginning, begin, train_beginning

log = logging.getLogger(__name__)

TOPIC = "start"

WAIT_S = 300.0
"""After so long a member trains the beginning itself: the seed makes it the same."""


class Desk(Protocol):
    """What is needed of a run."""

    @property
    def slot(self) -> int:
        """Own number."""
        ...

    @property
    def member(self) -> str:
        """Own name."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether the job, or this process, was asked to stop."""
        ...

    def topic(self, name: str, **options: Any) -> Topic:
        """Return a topic of the job."""
        ...


def shared_beginning(spec: JobSpec, desk: Desk, *, wait_s: float = WAIT_S) -> Beginning | None:
    """Return what all members start from; None if a stop was asked for meanwhile.

    The member in slot 0 trains it, unless it was trained already: by a process before, or elsewhere
    (`start` in [rl]).

    Raises:
        ConfigError: a task, or the model, cannot be made.
        CheckpointError: the weights that `start` names cannot be used.
    """
    beginning = begin(spec)
    if beginning.trained:
        return beginning
    topic = desk.topic(TOPIC, max_items=1)
    reader = topic.subscribe(f"{desk.member}.{TOPIC}", start="oldest")
    entry = reader.newest() if desk.slot == 0 else reader.newest(wait_s=wait_s)
    if entry is not None:
        _load(beginning, decode_snapshot(entry.value))
        return beginning
    if not desk.stopping:
        loss = train_beginning(beginning, spec, stopping=lambda: desk.stopping)
        log.info("trained on examples: %.3f nats per token", loss)
    if desk.stopping:
        return None
    topic.publish(encode_snapshot(beginning.model.state_dict()))
    return beginning


def _load(beginning: Beginning, tensors: Mapping[str, Tensor]) -> None:
    load_module(beginning.model, tensors, what="the model that all start from")
