"""Divides cores, accelerators and memory of one machine among its processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from atoll import system
from atoll.config import JobSpec, agreed_device, member_spec
from atoll.config.constraints import AUTO_DEVICE, CPU_DEVICE
from atoll.ids import is_reducer
from atoll.node.launchers.launcher import ResourceCaps
from atoll.wire.messages import Offer

GB = 10**9
LARGEST_NICE = 19
CUDA = "cuda"
"""Kind of accelerators that can be hidden from a process; those of ROCm have the same name."""


class ResourceAllocator:
    """Allocations of a machine, limited by the job's `[needs]` and the owner's offer."""

    def __init__(self, *, slots: int, gpus: int, cpus: Sequence[int] | None = None) -> None:
        """Allocate for `slots` processes at once; `cpus` None: those that this process may use."""
        self._slots = max(1, slots)
        self._gpus = gpus
        self._cpus = list(system.usable_cpus() if cpus is None else cpus)
        self._cpu_users: Counter[int] = Counter()
        self._gpu_users: Counter[int] = Counter()

    def take(self, spec: JobSpec, *, member: str, offer: Offer, nice: int) -> ResourceCaps:
        """Allocate the limits of a new process, until `give_back`.

        The reducer is not a member, so `[needs]` do not apply to it.
        """
        needs = spec.needs if not is_reducer(member) else type(spec.needs)()
        shape = member_spec(spec, member).mesh
        ranks = 1 if is_reducer(member) else shape.ranks // spec.island.machines
        cores = needs.cores or (offer.cores / self._slots if offer.cores else 0.0)
        if offer.cores and cores > offer.cores:
            cores = offer.cores
        memory, source = self._memory(needs.memory_gb, offer)
        caps = ResourceCaps(
            cpus=self._choose_cpus(cores, allowed=offer.cores),
            cores=cores,
            threads=_threads(spec, cores / ranks),
            nice=min(LARGEST_NICE, max(0, spec.launch.nice, nice)),
            memory_bytes=memory,
            memory_from=source,
            gpus=self._choose_gpus(ranks, agreed_device(spec.job.device, offer.device)),
            gpus_by_owner=offer.device != AUTO_DEVICE,
        )
        self._cpu_users.update(caps.cpus)
        self._gpu_users.update(caps.gpus or ())
        return caps

    def give_back(self, caps: ResourceCaps) -> None:
        """Release the allocation of an ended process."""
        self._cpu_users.subtract(caps.cpus)
        self._gpu_users.subtract(caps.gpus or ())

    def _memory(self, wanted_gb: float, offer: Offer) -> tuple[int, str]:
        wanted = round(wanted_gb * GB)
        if wanted and (not offer.memory_bytes or wanted <= offer.memory_bytes):
            return wanted, "[needs] memory_gb of the job"
        if wanted or self._slots == 1:
            return offer.memory_bytes, "the owner of this machine" if offer.memory_bytes else ""
        share = offer.memory_bytes // self._slots
        return share, f"the owner of this machine, for each of {self._slots}" if share else ""

    def _choose_cpus(self, cores: float, *, allowed: float) -> tuple[int, ...]:
        """Return the cores with the fewest users, below the owner's limit."""
        if not cores:
            return ()
        cpus = self._cpus[: math.ceil(allowed)] if allowed else self._cpus
        count = min(len(cpus), math.ceil(cores))
        return tuple(sorted(sorted(cpus, key=lambda cpu: self._cpu_users[cpu])[:count]))

    def _choose_gpus(self, ranks: int, device: str) -> tuple[int, ...] | None:
        """Return one accelerator per rank; None (all) for a machine with one slot.

        `device` is what job and owner agree on: no accelerator, or a certain one.
        """
        kind, _, index = device.partition(":")
        if kind == CPU_DEVICE:
            return ()
        if kind == CUDA and index:
            return (int(index),)
        if self._gpus == 0 or self._slots == 1:
            return None
        by_users = sorted(range(self._gpus), key=lambda gpu: self._gpu_users[gpu])
        return tuple(sorted(by_users[:ranks]))


def device_of(spec: JobSpec, offer: Offer) -> str:
    """Return the device that a process is to compute on, by its own numbering.

    It sees only the CUDA device that was chosen for it, as number 0.
    """
    device = agreed_device(spec.job.device, offer.device)
    return CUDA if device.startswith(f"{CUDA}:") else device


def _threads(spec: JobSpec, cores: float) -> int:
    """Return the threads of numeric libraries; programs other than Atoll's own may use all cores.

    `[job] threads` defaults to one, which is meant for Atoll's workers. `cores` are those of one
    process: the ranks of an island share the cores of their member.
    """
    ours = spec.kind in ("trainer", "rl", "script")
    wanted = spec.job.threads if ours or spec.job.threads > 1 else 0
    if not cores:
        return wanted
    return min(wanted or math.ceil(cores), math.ceil(cores))
