"""Stands in for the hub's `Checkpoints`: parts arrive, the manifest comes last; both last."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from atoll.wire.messages import CheckpointPart
from atoll.wire.part_check import Newest

if TYPE_CHECKING:
    from tests.faults.simulation.disk import Disk


class SimulatedCheckpoints:
    """Publishes a round when everybody of it who still lives has sent its part."""

    def __init__(self, *, jobs: Any, rounds: Any, **more: Any) -> None:
        from tests.faults.simulation.world import current

        self._jobs, self._rounds = jobs, rounds
        self._disk: Disk = current().disk

    async def begin(self, job: str, *, resume: Newest) -> None:
        """Forget what was saved after a round."""
        disk = self._disk
        disk.published = {r for r in disk.published if r <= resume.round}
        disk.parts = {r: parts for r, parts in disk.parts.items() if r <= resume.round}

    async def deliver(self, job: str, member: str, part: CheckpointPart) -> bool:
        await asyncio.sleep(0.002)
        self._disk.parts.setdefault(part.round, {})[part.name] = member
        return await self._publish(job, part.round)

    async def _publish(self, job: str, round_: int) -> bool:
        disk = self._disk
        if round_ in disk.published:
            return True
        record = self._jobs.get(job)
        live = {m.member for m in record.members.values() if m.live}
        awaited = live & set(await self._rounds.store.members_of(job, round_) or live)
        parts = disk.parts.get(round_, {})
        delivered = {member for name, member in parts.items() if name != "shared.safetensors"}
        if "shared.safetensors" not in parts or awaited - delivered or disk.full:
            return False
        disk.published.add(round_)
        return True

    async def forget(self, job: str) -> None:
        """Do nothing: no copies are under way."""

    async def member_gone(self, job: str) -> None:
        for round_ in list(self._disk.parts):
            await self._publish(job, round_)

    async def newest(self, job: str) -> Newest:
        return Newest(max(self._disk.published, default=-1))

    async def restart(self) -> None:
        """Nothing is under way after a restart."""

    async def close(self) -> None:
        """Nothing is to be closed."""
