"""Why a job waits: what each machine lacks, who comes first, and what no machine will ever have."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from atoll.config import NeedsTable
from atoll.hub.jobs.people import LISTED
from atoll.hub.scheduler.assign import WHOLE, Demand, assign
from atoll.hub.scheduler.resources import GB, Capacity, ResourceRequest, Usage, mismatch
from atoll.wire.messages import NodeInfo, Offer
from tests.hub.scheduler.demands import ask, place

INFO = NodeInfo(
    "box",
    "Linux",
    "3.11",
    "t",
    cores=8,
    memory_bytes=int(16 * GB),
    disk_free_bytes=int(50 * GB),
    gpu="NVIDIA H200",
    gpu_memory_bytes=int(141 * GB),
    gpus=1,
    slots=4,
)


@pytest.mark.parametrize(
    ("want", "change", "why"),
    [
        (ResourceRequest(), {}, ""),
        (ResourceRequest(), {"connected": False}, "not connected"),
        (ResourceRequest(), {"draining": "new memory"}, "is draining: new memory"),
        (ResourceRequest(), {"offer": Offer(paused="on battery")}, "on battery"),
        (ResourceRequest(on=("lap2",)), {}, "not among the nodes it may run on (lap2)"),
        (ResourceRequest(on=("lap2", "lap1")), {}, ""),
        (ResourceRequest(on=("lap",)), {"node": "lap-3f9a"}, ""),
        (
            ResourceRequest(kind="script"),
            {"offer": Offer(kinds=["trainer"])},
            "its owner does not run jobs of kind script",
        ),
        (
            ResourceRequest(kind="container", container=True),
            {},
            "no Docker or Podman is available",
        ),
        (
            ResourceRequest(kind="container", container=True),
            {"launchers": ["process", "container"]},
            "",
        ),
        (
            ResourceRequest(kind="container", container=True),
            {"launchers": ["container"], "offer": Offer(kinds=["signed"])},
            "its owner does not run jobs of kind container",
        ),
        (
            ResourceRequest(kind="container", container=True, signed=True),
            {"launchers": ["container"], "offer": Offer(kinds=["signed"])},
            "",
        ),
        (ResourceRequest(mounts=("/data/big",)), {"offer": Offer(mounts=["/data"])}, ""),
        (
            ResourceRequest(mounts=("/database",)),
            {"offer": Offer(mounts=["/data"])},
            "its owner does not allow the folder /database",
        ),
        (
            ResourceRequest(direct=True),
            {"offer": Offer(upload_bps=1e6)},
            "its owner limits bandwidth, which the direct route would bypass",
        ),
        (ResourceRequest(direct=True), {"offer": Offer()}, ""),
        (
            ResourceRequest(needs=NeedsTable(labels=["fast", "near"])),
            {"offer": Offer(labels=["fast"])},
            "lacks the label near",
        ),
        (ResourceRequest(needs=NeedsTable(labels=["fast"])), {}, "lacks the label fast"),
        (ResourceRequest(), {"used": Usage(processes=4)}, "busy"),
        (
            ResourceRequest(needs=NeedsTable(cores=3)),
            {"used": Usage(cores=6.0)},
            "3 cores wanted, 2 free",
        ),
        (
            ResourceRequest(needs=NeedsTable(cores=3)),
            {"offer": Offer(cores=2)},
            "3 cores wanted, it has 2",
        ),
        (
            ResourceRequest(needs=NeedsTable(memory_gb=8)),
            {"used": Usage(memory_bytes=12.9 * GB)},
            "8 GB memory wanted, 3.1 GB free",
        ),
        (ResourceRequest(needs=NeedsTable(disk_gb=60)), {}, "60 GB disk wanted, 50 GB free"),
        (
            ResourceRequest(needs=NeedsTable(disk_gb=40)),
            {"stats": {"disk_free_bytes": 30 * GB}},
            "40 GB disk wanted, 30 GB free",
        ),
        (ResourceRequest(needs=NeedsTable(gpu="h200")), {}, ""),
        (ResourceRequest(needs=NeedsTable(gpu="A100")), {}, "A100 wanted, it has NVIDIA H200"),
        (
            ResourceRequest(needs=NeedsTable(gpu="any")),
            {"gpu": ""},
            "accelerator wanted, it has no accelerator",
        ),
        (
            ResourceRequest(needs=NeedsTable(gpu="any")),
            {"offer": Offer(device="cpu")},
            "accelerator wanted, its owner keeps the accelerator",
        ),
        (ResourceRequest(), {"offer": Offer(device="cpu")}, ""),
        (ResourceRequest(needs=NeedsTable(gpu="any")), {"offer": Offer(device="cuda:1")}, ""),
        (
            ResourceRequest(needs=NeedsTable(gpu="any")),
            {"offer": Offer(device="cuda:1"), "used": Usage(gpus=1)},
            "all its accelerators are in use",
        ),
        (
            ResourceRequest(needs=NeedsTable(gpu="any")),
            {"used": Usage(gpus=1)},
            "all its accelerators are in use",
        ),
        (
            ResourceRequest(needs=NeedsTable(gpu="any"), gpus=4),
            {},
            "4 accelerators wanted, one per rank, 1 free",
        ),
        (ResourceRequest(gpus=4), {}, ""),
        (
            ResourceRequest(needs=NeedsTable(gpu_memory_gb=200)),
            {},
            "200 GB accelerator memory wanted, it has 141 GB",
        ),
        (
            ResourceRequest(needs=NeedsTable(bandwidth_mbps=10)),
            {},
            "its bandwidth is not measured yet",
        ),
        (
            ResourceRequest(needs=NeedsTable(bandwidth_mbps=10)),
            {"stats": {"up_bps": 2e7, "down_bps": 9e7}},
            "",
        ),
        (
            ResourceRequest(needs=NeedsTable(bandwidth_mbps=10)),
            {"stats": {"up_bps": 2e7, "down_bps": 9e7}, "used": Usage(bandwidth_bps=1.5e7)},
            "10 Mbit/s wanted, 5 free",
        ),
        (
            ResourceRequest(needs=NeedsTable(bandwidth_mbps=10)),
            {"stats": {"up_bps": 2e7, "down_bps": 9e7}, "offer": Offer(upload_bps=8e6)},
            "10 Mbit/s wanted, 8 free",
        ),
    ],
)
def test_misfit_says_what_is_missing(
    want: ResourceRequest, change: dict[str, object], why: str
) -> None:
    of_info = {name: change[name] for name in ("offer", "launchers", "gpu") if name in change}
    of_place = {name: value for name, value in change.items() if name not in of_info}
    there = Capacity(node="lap1", info=msgspec.structs.replace(INFO, **of_info))
    there = replace(there, **of_place)  # type: ignore[arg-type]
    assert mismatch(want, there) == (f"{there.node}: {why}" if why else "")


def test_lower_priority_learns_who_a_node_is_kept_for() -> None:
    there = [place("n0", slots=1), place("n1", slots=1, used=Usage(processes=1))]
    low, high = ask("low"), ask("high", least=2, most=2, priority=1, number=1)
    made = assign([low, high], there)
    assert not made.granted
    assert str(made.short["low"]) == (
        "needs 1 node, 0 are free (n0: kept for high, which comes first; n1: busy)"
    )


def test_only_the_reasons_that_matter_are_told() -> None:
    """Nodes with one reason are named together, those that are not there last, the rest counted."""
    full = [place(f"m{i:02}", slots=0) for i in range(LISTED + 5)]
    assert str(assign([ask("j")], full).short["j"]) == (
        "needs 1 node, 0 are free (m00, m01 and 6 more: takes no jobs)"
    )
    gone = [place(f"gone{i}", connected=False) for i in range(9)]
    full = [place(f"n{i}", slots=i + 1, used=Usage(processes=i + 1)) for i in range(2)]
    drained = [place(f"n{i + 2}", draining=f"reason {i}") for i in range(2)]
    assert str(assign([ask("j")], gone + full + drained).short["j"]) == (
        "needs 1 node, 0 are free (n0, n1: busy; n2: is draining: reason 0; "
        "n3: is draining: reason 1; and 9 more)"
    )


def test_job_that_no_machine_can_ever_run_says_so() -> None:
    busy = place("n0", slots=1, memory_gb=25.3, used=Usage(processes=1))
    away = place("n1", memory_gb=8, connected=False)
    made = assign([ask("large", memory_gb=400)], [busy, away])
    assert str(made.short["large"]) == (
        "no machine here can ever run this: it needs 400 GB of memory, the largest has 25.3 GB"
    )
    fits = assign([ask("fits", memory_gb=20)], [busy, away])
    assert str(fits.short["fits"]) == ("needs 1 node, 0 are free (n0: busy; n1: not connected)")
    cores = assign([ask("wide", cores=64)], [busy, away])
    assert "it needs 64 cores, the largest has 4" in str(cores.short["wide"])
    labels = Demand(key=("l", WHOLE), want=ResourceRequest(needs=NeedsTable(labels=["fast"])))
    assert "run this: n0, n1: lacks the label fast" in str(
        assign([labels], [busy, away]).short["l"]
    )
    gone = assign([ask("gone", on=("n9",))], [busy, away])
    assert "it may run on n9 only, which the hub does not know" in str(gone.short["gone"])


def test_what_a_busy_machine_will_never_have_comes_first() -> None:
    busy = place("n0", slots=1, memory_gb=8, used=Usage(processes=1))
    want = ResourceRequest(needs=NeedsTable(memory_gb=400))
    assert mismatch(want, busy) == "n0: 400 GB memory wanted, it has 8 GB"
