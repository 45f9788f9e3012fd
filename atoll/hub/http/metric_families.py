"""Metric families of the hub: the source of /metrics and of the OpenTelemetry export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.hub.http.context import Context
from atoll.hub.http.hub import rss_bytes
from atoll.hub.http.jobs import view_of
from atoll.hub.http.limits import fullest
from atoll.hub.quotas.ledger import Use
from atoll.hub.swarm.view import PeerState
from atoll.wire.states import JobState, MemberState, NodeState

ENDED_SHOWN_S = 3_600.0
"""How long metrics of an ended job are exported."""

Sample = tuple[dict[str, str], float | None]
Row = Mapping[str, Any]
_Figure = tuple[str, str, str, str]
"""Name without prefix, kind, help text, key."""


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of one metric. A value of None is omitted."""

    name: str
    kind: str
    """`gauge` or `counter`."""
    text: str
    samples: Sequence[Sample]


_OF_NODES: tuple[_Figure, ...] = (
    ("sent_bytes_total", "counter", "Sent by a node.", "sent_bytes"),
    ("received_bytes_total", "counter", "Received by a node.", "received_bytes"),
    ("tokens_per_second", "gauge", "Tokens that its members train on.", "tokens_per_s"),
    ("last_seen_seconds", "gauge", "Time since its last message.", "last_seen_s"),
)
_OF_STATS: tuple[_Figure, ...] = (
    ("cpu_percent", "gauge", "Processors in use.", "cpu_percent"),
    ("memory_percent", "gauge", "Memory in use.", "memory_percent"),
    ("memory_free_bytes", "gauge", "Memory that is free.", "memory_free_bytes"),
    ("load", "gauge", "Load of one minute.", "load"),
    ("disk_free_bytes", "gauge", "Free space on its disk.", "disk_free_bytes"),
    ("battery_percent", "gauge", "Charge of its battery.", "battery_percent"),
    ("on_battery", "gauge", "1 if it runs on battery.", "on_battery"),
    ("gpu_percent", "gauge", "Accelerator in use.", "gpu_percent"),
    ("gpu_memory_used_bytes", "gauge", "Memory of the accelerator in use.",
     "gpu_memory_used_bytes"),
    ("latency_milliseconds", "gauge", "Round trip to the hub.", "latency_ms"),
    ("up_bits_per_second", "gauge", "Measured speed to the hub.", "up_bps"),
    ("down_bits_per_second", "gauge", "Measured speed from the hub.", "down_bps"),
    ("reconnects_total", "counter", "Reconnects.", "reconnects"),
)  # fmt: skip
_OF_JOBS: tuple[_Figure, ...] = (
    ("rounds_committed_total", "counter", "Committed rounds.", "committed_round"),
    ("rounds_aborted_total", "counter", "Aborted attempts.", "aborted_rounds"),
    ("loss", "gauge", "Training loss, mean of its members.", "loss"),
    ("held_out_loss", "gauge", "Loss on held-out data, text: nats per token.", "held_out_loss"),
    ("tokens_per_second", "gauge", "Speed of all its members.", "tokens_per_s"),
    ("sent_bytes_total", "counter", "Sent by its members.", "sent_bytes"),
    ("received_bytes_total", "counter", "Received by its members.", "received_bytes"),
)
_OF_MEMBERS: tuple[_Figure, ...] = (
    ("loss", "gauge", "Training loss.", "loss"),
    ("step", "gauge", "Optimizer steps.", "step"),
    ("tokens_per_second", "gauge", "Speed.", "tokens_per_s"),
    ("sent_bytes_total", "counter", "Sent by a member.", "sent_bytes"),
    ("received_bytes_total", "counter", "Received by a member.", "received_bytes"),
)
_OF_STAGES: tuple[_Figure, ...] = (
    ("counted", "gauge", "Microbatches of the present step that count.", "counted"),
    ("rows_per_second", "gauge", "Rows that its members train on together.", "rows_per_s"),
    ("slowest", "gauge", "1 if it holds all others up.", "slowest"),
)
_OF_PEERS: tuple[_Figure, ...] = (
    ("rows_per_second", "gauge", "Rows that a member of a stage trains on.", "rows_per_s"),
    ("queue", "gauge", "Microbatches that wait at it.", "queue"),
    ("path_share", "gauge", "Share of the newest paths through its stage.", "share"),
    ("failures", "gauge", "Times it was banned in ten minutes.", "failures"),
)
_OF_QUEUES: tuple[_Figure, ...] = (
    ("bytes", "gauge", "Bytes stored.", "bytes"),
    ("oldest_seconds", "gauge", "Age of the oldest item that is ready.", "oldest_s"),
    ("in_per_second", "gauge", "Items put.", "in_per_s"),
    ("out_per_second", "gauge", "Items acknowledged.", "out_per_s"),
    ("waiting_producers", "gauge", "Producers that wait for space.", "waiting_producers"),
    ("subscribers", "gauge", "Readers of a topic.", "subscribers"),
)
_RELAY = (("frames_total", "Forwarded frames.", "frames"),
          ("bytes_total", "Forwarded bytes.", "bytes"),
          ("dropped_total", "Frames without a receiver.", "dropped"))  # fmt: skip


async def families(context: Context) -> list[Family]:
    """Return all current metrics."""
    now = context.clock.wall()
    jobs = [
        view_of(context, job.job)
        for job in context.stores.jobs.list()
        if not job.over or (job.ended or 0.0) > now - ENDED_SHOWN_S
    ]
    states = [job.state for job in context.stores.jobs.list()]
    relay = context.live.relay()
    return [
        _one("atoll_hub_uptime_seconds", "gauge", "Time since start.", now - context.started),
        _one("atoll_hub_resident_bytes", "gauge", "Memory in use.", rss_bytes()),
        _one("atoll_sessions", "gauge", "Open sessions.", relay.get("sessions")),
        *(
            _one(f"atoll_relay_{name}", "counter", text, relay.get(key))
            for name, text, key in _RELAY
        ),
        *_nodes(context.live.nodes()),
        Family("atoll_jobs", "gauge", "Jobs by state.",
               [({"state": state}, states.count(state)) for state in JobState]),
        *_jobs(jobs),
        *_queues(await context.stores.queue.rows()),
        *_quotas(await context.stores.ledger.uses()),
        *_alarms(context.stores.alarms.open()),
    ]  # fmt: skip


def _nodes(nodes: Sequence[Row]) -> list[Family]:
    def flag(name: str, text: str, of: Callable[[Row], bool]) -> Family:
        samples = [({"node": str(node["node"])}, float(of(node))) for node in nodes]
        return Family(f"atoll_node_{name}", "gauge", text, samples)

    return [
        flag("online", "1 if the node is connected.", _is_online),
        flag("draining", "1 if it takes no new work.", lambda node: bool(node["draining"])),
        flag("paused", "1 if its owner's policy pauses it.", _is_paused),
        *_table("atoll_node", _OF_NODES, [({"node": str(n["node"])}, n) for n in nodes]),
        *_table("atoll_node", _OF_STATS, [({"node": str(n["node"])}, n["stats"]) for n in nodes]),
    ]


def _is_online(node: Row) -> bool:
    return bool(node["state"] == NodeState.ONLINE)


def _is_paused(node: Row) -> bool:
    offer = node["info"].get("offer")
    return bool(offer is not None and offer.paused)


def _jobs(jobs: Sequence[Row]) -> list[Family]:
    labelled = [({"job": str(job["job"])}, job) for job in jobs]
    members = [
        ({"job": str(job["job"]), "member": member["member"], "node": member["node"]}, member)
        for job in jobs
        if job["state"] == JobState.RUNNING
        for member in job["members"]
    ]
    running: list[Sample] = [
        (labels, sum(m["state"] == MemberState.RUNNING for m in job["members"]))
        for labels, job in labelled
    ]
    return [
        Family("atoll_job_state", "gauge", "1 for the current state of a job.",
               [(labels | {"state": str(job["state"])}, 1) for labels, job in labelled]),
        Family("atoll_job_progress_ratio", "gauge", "Fraction of steps that are done.",
               [(labels, job["progress"]["fraction"]) for labels, job in labelled]),
        Family("atoll_job_members", "gauge", "Running members.", running),
        *_table("atoll_job", _OF_JOBS, labelled),
        *_table("atoll_member", _OF_MEMBERS, members),
        *_stages([job for job in jobs if job["swarm"] is not None]),
    ]  # fmt: skip


def _stages(jobs: Sequence[Row]) -> list[Family]:
    """Return the metrics of SWARMs; none without one."""
    if not jobs:
        return []
    stages = [
        ({"job": str(job["job"]), "stage": str(stage["stage"])},
         stage | {"slowest": float(stage["slowest"])})
        for job in jobs
        for stage in job["swarm"]["stages"]
    ]  # fmt: skip
    peers = [
        (labels | {"member": peer["member"], "node": peer["node"]}, peer)
        for labels, stage in stages
        for peer in stage["peers"]
    ]
    swarms = [({"job": str(job["job"])}, job["swarm"]) for job in jobs]
    members: list[Sample] = [
        (labels | {"state": state}, sum(peer["state"] == state for peer in stage["peers"]))
        for labels, stage in stages
        for state in PeerState
    ]
    return [
        Family("atoll_swarm_paused", "gauge", "1 while a stage has no member.",
               [(labels, float(bool(swarm["paused"]))) for labels, swarm in swarms]),
        Family("atoll_swarm_microbatches_per_second", "gauge", "Microbatches that came through.",
               [(labels, swarm["microbatches_per_s"]) for labels, swarm in swarms]),
        Family("atoll_stage_members", "gauge", "Members of a stage by state.", members),
        *_table("atoll_stage", _OF_STAGES, stages),
        *_table("atoll_stage_member", _OF_PEERS, peers),
    ]  # fmt: skip


def _queues(queues: Sequence[Row]) -> list[Family]:
    labelled = [({"queue": str(row["queue"])}, row) for row in queues]
    items: list[Sample] = [
        (labels | {"state": state}, row.get(state))
        for labels, row in labelled
        for state in ("ready", "leased", "dead")
    ]
    return [
        Family("atoll_queue_items", "gauge", "Items by state.", items),
        *_table("atoll_queue", _OF_QUEUES, labelled),
    ]


def _quotas(uses: Sequence[Use]) -> list[Family]:
    labelled = [
        ({"kind": use.kind.value, "role": use.holder.role, "name": use.holder.name,
          "member": use.holder.member}, use)
        for use in fullest(uses)
    ]  # fmt: skip
    return [
        Family("atoll_quota_used", "gauge", "Use of a limit; the fullest of every kind.",
               [(labels, use.used) for labels, use in labelled]),
        Family("atoll_quota_limit", "gauge", "What may be used; absent: any amount.",
               [(labels, use.limit or None) for labels, use in labelled]),
        Family("atoll_quota_refused_total", "counter", "Requests refused because of it.",
               [(labels, use.refused) for labels, use in labelled]),
    ]  # fmt: skip


def _alarms(alarms: Iterable[Row]) -> list[Family]:
    samples: list[Sample] = []
    for alarm in alarms:
        labels = {name: str(alarm.get(name) or "") for name in ("kind", "severity", "job", "node")}
        samples.append((labels | {"id": str(alarm["id"])}, 1))
    severities = [labels["severity"] for labels, _ in samples]
    return [
        Family("atoll_alarms", "gauge", "Open alarms.",
               [({"severity": s}, severities.count(s)) for s in ("warning", "critical")]),
        Family("atoll_alarm", "gauge", "1 for every open alarm.", samples),
    ]  # fmt: skip


def _table(
    prefix: str, figures: Iterable[_Figure], rows: Sequence[tuple[dict[str, str], Row]]
) -> list[Family]:
    return [
        Family(f"{prefix}_{name}", kind, text, [(labels, row.get(key)) for labels, row in rows])
        for name, kind, text, key in figures
    ]


def _one(name: str, kind: str, text: str, value: float | None) -> Family:
    return Family(name, kind, text, [({}, value)])
