"""Places of small machines, and what jobs demand of them."""

from __future__ import annotations

from dataclasses import replace

from atoll.config import NeedsTable
from atoll.hub.scheduler.assign import WHOLE, Demand
from atoll.hub.scheduler.resources import GB, Capacity, ResourceRequest
from atoll.wire.messages import NodeInfo


def place(
    name: str, *, slots: int = 2, cores: int = 4, memory_gb: float = 8, **more: object
) -> Capacity:
    info = NodeInfo(
        "box", "Linux", "3.11", "t", cores=cores, memory_bytes=int(memory_gb * GB), slots=slots
    )
    return replace(Capacity(node=name, info=info), **more)  # type: ignore[arg-type]


def ask(
    job: str, *, slot: int = WHOLE, cores: float = 0.0, memory_gb: float = 0.0, **more: object
) -> Demand:
    needs = NeedsTable(cores=cores, memory_gb=memory_gb)
    want = ResourceRequest(needs=needs, on=more.pop("on", ()))  # type: ignore[arg-type]
    return Demand(key=(job, slot), want=want, **more)  # type: ignore[arg-type]
