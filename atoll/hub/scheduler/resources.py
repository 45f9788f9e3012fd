"""Whether a process fits on a node, and if not, why; pure functions, used by all of the scheduler.

`[needs]` is a reservation: the needs of all processes on a node together stay within the machine's
resources and its owner's limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from atoll.config import JobSpec, NeedsTable, member_spec
from atoll.hub.jobs.people import LISTED, few
from atoll.wire.messages import NodeInfo, Offer

GB = 1e9
MBPS = 1e6

_SLACK = 1e-6
"""Relative tolerance, so that rounding of decimal shares does not prevent a placement."""

ABSENT = "not connected"

_SUFFIX = re.compile(r"-[0-9a-f]{4}")
"""The suffix that the hub appends to the name of a second machine with the same name."""


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """What one process of a job needs from a node."""

    needs: NeedsTable = field(default_factory=NeedsTable)
    kind: str = "trainer"
    container: bool = False
    """It is started as a container."""
    signed: bool = False
    """Its image has a signature, which the node checks."""
    mounts: tuple[str, ...] = ()
    """Folders of the node that its container wants."""
    direct: bool = False
    """Its members must connect directly."""
    on: tuple[str, ...] = ()
    """Nodes that may run it; none: any."""
    gpus: int = 1
    """Accelerators, if it needs any: one per rank of an island on this machine."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Resources of a node reserved by processes of jobs."""

    processes: int = 0
    cores: float = 0.0
    memory_bytes: float = 0.0
    gpus: int = 0
    disk_bytes: float = 0.0
    bandwidth_bps: float = 0.0

    def plus(self, needs: NeedsTable, *, count: int = 1, gpus: int = 1) -> Usage:
        """Return this usage with more processes, each with its accelerators."""
        return Usage(
            processes=self.processes + count,
            cores=self.cores + count * needs.cores,
            memory_bytes=self.memory_bytes + count * needs.memory_gb * GB,
            gpus=self.gpus + count * gpus * wants_gpu(needs),
            disk_bytes=self.disk_bytes + count * needs.disk_gb * GB,
            bandwidth_bps=self.bandwidth_bps + count * needs.bandwidth_mbps * MBPS,
        )


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """A node's resources for processes."""

    node: str
    info: NodeInfo
    connected: bool = True
    draining: str = ""
    """Why it drains; empty: it does not."""
    stats: Mapping[str, float] = field(default_factory=dict)
    used: Usage = field(default_factory=Usage)
    source: str = ""
    """Network address that it comes from; empty: not known."""

    @property
    def free_slots(self) -> int:
        """How many more processes it can take, regardless of their needs."""
        return max(0, self.info.slots - self.used.processes)

    def with_one_more(self, needs: NeedsTable, *, gpus: int = 1) -> Capacity:
        """Return this capacity with one more process."""
        return replace(self, used=self.used.plus(needs, gpus=gpus))

    def emptied(self) -> Capacity:
        """Return this capacity without any processes."""
        return replace(self, used=Usage())


def request_of(spec: JobSpec, *, member: str = "") -> ResourceRequest:
    """Return what one process of a job needs from a node; that of a member, if it is known."""
    shape = (member_spec(spec, member) if member else spec).mesh
    return ResourceRequest(
        needs=spec.needs,
        kind=spec.permission,
        container=spec.launch.launcher == "container",
        signed=bool(spec.launch.signature),
        mounts=tuple(mount.partition(":")[0] for mount in spec.launch.mounts),
        direct=spec.job.route == "direct" and spec.job.nodes > 1,
        on=tuple(spec.job.on),
        gpus=1 if spec.job.device == "cpu" else shape.ranks // spec.island.machines,
    )


def wants_gpu(needs: NeedsTable) -> bool:
    """Return whether a process gets an accelerator exclusively."""
    return bool(needs.gpu or needs.gpu_memory_gb)


def answers_to(node: str, name: str) -> bool:
    """Return whether a name means this node: its id, or the id without its suffix."""
    return node == name or (node.startswith(name) and bool(_SUFFIX.fullmatch(node[len(name) :])))


def mismatch(want: ResourceRequest, place: Capacity) -> str:
    """Return why a process does not fit on a node, e.g. `lap2: on battery`; empty: it fits."""
    why = (
        _is_not_there(want, place)
        or lasting(want, place)
        or _is_full(want.needs, place)
        or _lacks_gpu(want, place)
        or _is_far(want.needs, place)
    )
    return f"{place.node}: {why}" if why else ""


def lasting(want: ResourceRequest, place: Capacity) -> str:
    """Return why a process will not fit even when the machine is idle; empty: it may fit then."""
    return (
        _is_not_meant(want, place)
        or _is_not_allowed(want, place)
        or _is_too_small(want.needs, place)
        or _lacks_gpu(want, place.emptied())
    )


def never(want: ResourceRequest, places: Iterable[Capacity]) -> str:
    """Return why no known machine can run a process, connected or not; empty: one may.

    What all machines lack is compared with the largest of them.
    """
    everything = list(places)
    offers = [place for place in everything if not _is_not_meant(want, place)]
    if everything and not offers:
        return f"it may run on {', '.join(want.on)} only, which the hub does not know"
    reasons = [f"{place.node}: {why}" for place in offers if (why := lasting(want, place))]
    if not offers or len(reasons) < len(offers):
        return ""
    needs = want.needs
    memory = max(_memory(place) for place in offers)
    cores = max(_cores(place) for place in offers)
    if _more(needs.memory_gb * GB, memory):
        return f"it needs {needs.memory_gb:g} GB of memory, the largest has {_gb(memory)}"
    if _more(needs.cores, cores):
        return f"it needs {needs.cores:g} cores, the largest has {cores:.3g}"
    return summarized(reasons)


def summarized(reasons: Sequence[str]) -> str:
    """Return the reasons of nodes, `NODE: why` each, in a few words for people.

    Nodes with one reason are named together. The reasons of connected nodes come first; of the
    nodes of other reasons than the first ones, only the number is named.
    """
    nodes: dict[str, list[str]] = {}
    for reason in reasons:
        node, _, why = reason.partition(": ")
        nodes.setdefault(why, []).append(node)
    order = sorted(nodes, key=lambda why: (why == ABSENT, -len(nodes[why])))
    parts = [f"{few(nodes[why])}: {why}" if why else few(nodes[why]) for why in order[:LISTED]]
    left = sum(len(nodes[why]) for why in order[LISTED:])
    return "; ".join(parts) + (f"; and {left} more" if left else "")


def _memory(place: Capacity) -> float:
    return _least(place.info.memory_bytes, (place.info.offer or Offer()).memory_bytes)


def _cores(place: Capacity) -> float:
    return _least(place.info.cores, (place.info.offer or Offer()).cores)


def free_share(want: ResourceRequest, place: Capacity, *, most: int) -> int:
    """Return how many processes fit on a node together, at most so many."""
    count = 0
    while count < most and not mismatch(want, place):
        place, count = place.with_one_more(want.needs, gpus=want.gpus), count + 1
    return count


def _is_not_there(want: ResourceRequest, place: Capacity) -> str:
    offer = place.info.offer or Offer()
    if other := _is_not_meant(want, place):
        return other
    if not place.connected:
        return ABSENT
    if place.draining:
        return f"is draining: {place.draining}"
    return offer.paused


def _is_not_meant(want: ResourceRequest, place: Capacity) -> str:
    if want.on and not any(answers_to(place.node, name) for name in want.on):
        return f"not among the nodes it may run on ({', '.join(want.on)})"
    return ""


def _is_not_allowed(want: ResourceRequest, place: Capacity) -> str:
    offer = place.info.offer
    if want.container and "container" not in place.info.launchers:
        return "no Docker or Podman is available"
    labels = offer.labels if offer is not None else []
    missing = [label for label in want.needs.labels if label not in labels]
    if missing:
        return f"lacks the label {', '.join(missing)}"
    if offer is None:
        return ""
    signed = want.signed and "signed" in offer.kinds
    if want.kind not in offer.kinds and not (want.kind in ("container", "script") and signed):
        return f"its owner does not run jobs of kind {want.kind}"
    if want.direct and (offer.upload_bps or offer.download_bps):
        return "its owner limits bandwidth, which the direct route would bypass"
    folders = [mount for mount in want.mounts if not _may_mount(mount, offer)]
    return f"its owner does not allow the folder {folders[0]}" if folders else ""


def _may_mount(folder: str, offer: Offer) -> bool:
    return any(
        folder.rstrip("/") == allowed.rstrip("/") or folder.startswith(allowed.rstrip("/") + "/")
        for allowed in offer.mounts
    )


def _is_too_small(needs: NeedsTable, place: Capacity) -> str:
    if _more(needs.cores, cores := _cores(place)):
        return f"{needs.cores:g} cores wanted, it has {cores:.3g}"
    if _more(needs.memory_gb * GB, memory := _memory(place)):
        return f"{needs.memory_gb:g} GB memory wanted, it has {_gb(memory)}"
    return ""


def _is_full(needs: NeedsTable, place: Capacity) -> str:
    info, offer, used = place.info, place.info.offer or Offer(), place.used
    if used.processes >= info.slots:
        return "busy" if info.slots else "takes no jobs"
    cores = _cores(place) - used.cores
    if _more(needs.cores, cores):
        return f"{needs.cores:g} cores wanted, {max(0.0, cores):.3g} free"
    memory = _memory(place) - used.memory_bytes
    if _more(needs.memory_gb * GB, memory):
        return f"{needs.memory_gb:g} GB memory wanted, {_gb(memory)} free"
    disk = place.stats.get("disk_free_bytes", float(info.disk_free_bytes))
    disk = _least(disk, offer.disk_bytes) - used.disk_bytes
    if _more(needs.disk_gb * GB, disk):
        return f"{needs.disk_gb:g} GB disk wanted, {_gb(disk)} free"
    return ""


def _lacks_gpu(want: ResourceRequest, place: Capacity) -> str:
    needs, info = want.needs, place.info
    if not wants_gpu(needs):
        return ""
    wanted = needs.gpu if needs.gpu not in ("", "any") else "accelerator"
    offered = (info.offer or Offer()).device
    if offered == "cpu":
        return f"{wanted} wanted, its owner keeps the accelerator"
    if not info.gpu:
        return f"{wanted} wanted, it has no accelerator"
    if wanted != "accelerator" and wanted.lower() not in info.gpu.lower():
        return f"{wanted} wanted, it has {info.gpu}"
    if _more(needs.gpu_memory_gb * GB, info.gpu_memory_bytes):
        return (
            f"{needs.gpu_memory_gb:g} GB accelerator memory wanted, it has "
            f"{_gb(info.gpu_memory_bytes)}"
        )
    free = (1 if ":" in offered else max(1, info.gpus)) - place.used.gpus
    if want.gpus > 1 and free < want.gpus:
        return f"{want.gpus} accelerators wanted, one per rank, {max(0, free)} free"
    return "all its accelerators are in use" if free < 1 else ""


def _is_far(needs: NeedsTable, place: Capacity) -> str:
    if not needs.bandwidth_mbps:
        return ""
    offer = place.info.offer or Offer()
    measured = [place.stats.get(name, 0.0) for name in ("up_bps", "down_bps")]
    if not all(measured):
        return "its bandwidth is not measured yet"
    ours = [bps - place.used.bandwidth_bps for bps in measured]
    free = min(_least(ours[0], offer.upload_bps), _least(ours[1], offer.download_bps))
    if _more(needs.bandwidth_mbps * MBPS, free):
        return f"{needs.bandwidth_mbps:g} Mbit/s wanted, {max(0.0, free) / MBPS:.2g} free"
    return ""


def _least(there: float, offered: float) -> float:
    """Return the machine's resource or its owner's lower limit; 0: no limit."""
    return min(there, offered) if offered else there


def _more(wanted: float, free: float) -> bool:
    return wanted > 0 and wanted * (1 - _SLACK) > free


def _gb(nbytes: float) -> str:
    return f"{max(0.0, nbytes) / GB:.3g} GB"
