"""Leases that a queue in NATS gets from consumers."""

from __future__ import annotations

from atoll.hub.queues.nats_items import NatsQueue
from atoll.hub.queues.nats_streams import StreamState


def test_a_lease_of_many_digits_is_no_lease() -> None:
    queue = NatsQueue(StreamState("q", False, "now", 0, 0, 0), [])
    assert queue.knows(queue.lease(1, 2, 3)) is None
    assert queue.knows("1." + "9" * 5_000 + ".3.x") is False
