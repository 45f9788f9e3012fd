"""Who gets which cores, accelerators and how much memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.config import IslandTable, JobSpec, JobTable, LaunchTable, NeedsTable, StrategyTable
from atoll.node.launchers.launcher import ResourceCaps
from atoll.node.launchers.resources import GB, ResourceAllocator, device_of
from atoll.wire.messages import Offer

CPUS = [0, 1, 2, 3]


def spec(
    *,
    cores: float = 0.0,
    memory_gb: float = 0.0,
    threads: int = 1,
    nice: int = 0,
    command: str = "",
) -> JobSpec:
    return JobSpec(
        job=JobTable(threads=threads, command=[command] if command else []),
        needs=NeedsTable(cores=cores, memory_gb=memory_gb),
        launch=LaunchTable(nice=nice),
    )


def take(
    shares: ResourceAllocator,
    wanted: JobSpec,
    *,
    offer: Offer | None = None,
    nice: int = 0,
    member: str = "w0",
) -> ResourceCaps:
    return shares.take(wanted, member=member, offer=offer or Offer(), nice=nice)


def test_processes_get_different_cores_if_available() -> None:
    shares = ResourceAllocator(slots=3, gpus=0, cpus=CPUS)
    first, second = take(shares, spec(cores=2)), take(shares, spec(cores=1.5))
    assert (first.cpus, second.cpus) == ((0, 1), (2, 3))
    assert second.cores == 1.5
    shares.give_back(first)
    assert take(shares, spec(cores=1)).cpus == (0,)


def test_job_without_needs_gets_the_whole_machine() -> None:
    assert take(ResourceAllocator(slots=4, gpus=0, cpus=CPUS), spec()) == ResourceCaps(threads=1)


def test_owner_leaves_cores_to_nobody_whatever_jobs_want() -> None:
    shares = ResourceAllocator(slots=2, gpus=0, cpus=CPUS)
    offer = Offer(cores=2.0)
    assert take(shares, spec(cores=4), offer=offer).cpus == (0, 1)
    assert set(take(shares, spec(), offer=offer).cpus) <= {0, 1}
    assert take(shares, spec(), offer=offer).cores == 1.0, "an equal share of what is offered"


@pytest.mark.parametrize(
    ("wanted", "threads"),
    [
        (spec(threads=8, cores=2), 2),
        (spec(threads=1, cores=2), 1),
        (spec(threads=0, cores=2), 2),
        (spec(command="python", cores=3), 3),
        (spec(command="python"), 0),
        (spec(command="python", threads=4), 4),
    ],
)
def test_threads_never_exceed_the_cores(wanted: JobSpec, threads: int) -> None:
    assert take(ResourceAllocator(slots=1, gpus=0, cpus=CPUS), wanted).threads == threads


@pytest.mark.parametrize(
    ("job", "owner", "nice"), [(0, 0, 0), (5, 10, 10), (12, 10, 12), (-5, 0, 0), (40, 0, 19)]
)
def test_niceness_is_the_greater_of_the_jobs_and_the_owners(
    job: int, owner: int, nice: int
) -> None:
    assert (
        take(ResourceAllocator(slots=1, gpus=0, cpus=CPUS), spec(nice=job), nice=owner).nice == nice
    )


@pytest.mark.parametrize(
    ("needs_gb", "offer_gb", "slots", "limit_gb", "source"),
    [
        (2, 0, 2, 2, "memory_gb"),
        (2, 8, 2, 2, "memory_gb"),
        (9, 8, 2, 8, "the owner"),
        (0, 8, 1, 8, "the owner"),
        (0, 8, 4, 2, "for each of 4"),
        (0, 0, 4, 0, ""),
    ],
)
def test_memory_limit_names_the_job_or_the_owner(
    needs_gb: int, offer_gb: int, slots: int, limit_gb: int, source: str
) -> None:
    caps = take(
        ResourceAllocator(slots=slots, gpus=0, cpus=CPUS),
        spec(memory_gb=needs_gb),
        offer=Offer(memory_bytes=offer_gb * GB),
    )
    assert caps.memory_bytes == limit_gb * GB
    assert source in caps.memory_from


def test_processes_share_accelerators_and_one_gets_all() -> None:
    shares = ResourceAllocator(slots=3, gpus=2, cpus=CPUS)
    first = take(shares, spec())
    assert [first.gpus, take(shares, spec()).gpus] == [(0,), (1,)]
    shares.give_back(first)
    assert take(shares, spec()).gpus == (0,)
    assert take(ResourceAllocator(slots=1, gpus=2, cpus=CPUS), spec()).gpus is None


@pytest.mark.parametrize(
    ("job", "owner", "gpus", "device"),
    [
        ("auto", "auto", None, "auto"),
        ("cuda:1", "auto", (1,), "cuda"),
        ("cpu", "auto", (), "cpu"),
        ("auto", "cpu", (), "cpu"),
        ("cuda:1", "cpu", (), "cpu"),
        ("cpu", "cuda:1", (), "cpu"),
        ("auto", "cuda:1", (1,), "cuda"),
        ("cuda:0", "cuda:1", (1,), "cuda"),
        ("auto", "mps", None, "mps"),
        ("xpu:1", "auto", None, "xpu:1"),
    ],
)
def test_the_owners_device_counts_before_the_jobs(
    job: str, owner: str, gpus: tuple[int, ...] | None, device: str
) -> None:
    wanted, offer = JobSpec(job=JobTable(device=job)), Offer(device=owner)
    caps = take(ResourceAllocator(slots=1, gpus=2, cpus=CPUS), wanted, offer=offer)
    assert (caps.gpus, caps.gpus_by_owner) == (gpus, owner != "auto")
    assert device_of(wanted, offer) == device


def test_ranks_share_cores_and_own_an_accelerator_each() -> None:
    wanted = replace(
        spec(threads=8, cores=4), strategy=StrategyTable(inner="fsdp"), island=IslandTable(ranks=2)
    )
    shares = ResourceAllocator(slots=3, gpus=4, cpus=CPUS)
    found = take(shares, wanted)
    assert (found.threads, found.gpus, len(found.cpus)) == (2, (0, 1), 4)
    assert take(shares, wanted).gpus == (2, 3)


@pytest.mark.parametrize("member", ["w0", "w0.1"])
def test_machine_serves_its_own_ranks_only(member: str) -> None:
    island = IslandTable(ranks=4, machines=2)
    wanted = replace(spec(threads=8, cores=4), strategy=StrategyTable(inner="fsdp"), island=island)
    found = take(ResourceAllocator(slots=3, gpus=4, cpus=CPUS), wanted, member=member)
    assert (found.threads, found.gpus, len(found.cpus)) == (2, (0, 1), 4)


def test_needs_of_a_job_do_not_bind_its_reducer() -> None:
    caps = take(
        ResourceAllocator(slots=1, gpus=0, cpus=CPUS), spec(cores=2, memory_gb=3), member="reducer"
    )
    assert (caps.cpus, caps.memory_bytes) == ((), 0)
