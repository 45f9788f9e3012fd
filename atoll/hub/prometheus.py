"""The hub's figures in Prometheus' text format, written by hand: a dozen families need no library.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text, version 0.0.4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from atoll.hub.queue import Depth

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[dict[str, str], float | None]


def family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> str:
    """Return one family of metrics; samples without a value are left out."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        if value is None:
            continue
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(
            f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"
        )
    return "\n".join(lines) + "\n"


def render(
    *,
    uptime_s: float,
    rss_bytes: int,
    nodes: list[dict[str, Any]],
    jobs: list[dict[str, Any]],
    depths: Mapping[str, Depth],
    relay: Mapping[str, float],
) -> str:
    """Return the whole page.

    Args:
        uptime_s: Seconds since the hub started.
        rss_bytes: Memory of the hub's process.
        nodes: Views of nodes (see `Live.nodes`).
        jobs: Views of jobs (see `job_view`).
        depths: How full each queue is.
        relay: The relay's counters.
    """
    states = ("waiting", "running", "done", "failed", "stopped")
    running = [job for job in jobs if job["state"] == "running"]
    members = [({"job": j["job"], "member": m["member"]}, m) for j in running for m in j["members"]]
    by_job = [({"job": job["job"]}, job) for job in jobs]
    node_labels = [({"node": str(node["node"])}, node) for node in nodes]

    def of_nodes(key: str) -> list[Sample]:
        return [(labels, node.get(key)) for labels, node in node_labels]

    def of_members(key: str) -> list[Sample]:
        return [(labels, member.get(key)) for labels, member in members]

    queue_states: list[Sample] = [
        ({"queue": queue, "state": state}, getattr(depth, state))
        for queue, depth in depths.items()
        for state in ("ready", "leased", "dead")
    ]
    online: list[Sample] = [(labels, float(n["state"] == "online")) for labels, n in node_labels]
    return "".join(
        [
            family("atoll_hub_uptime_seconds", "gauge", "Time since start.", [({}, uptime_s)]),
            family("atoll_hub_resident_bytes", "gauge", "Memory in use.", [({}, rss_bytes)]),
            family("atoll_node_online", "gauge", "1 if the node is connected.", online),
            family("atoll_node_sent_bytes_total", "counter", "Sent by a node.",
                   of_nodes("sent_bytes")),
            family("atoll_node_received_bytes_total", "counter", "Received by a node.",
                   of_nodes("received_bytes")),
            family("atoll_jobs", "gauge", "Jobs by state.",
                   [({"state": s}, sum(j["state"] == s for j in jobs)) for s in states]),
            family("atoll_job_rounds_committed_total", "counter", "Committed rounds.",
                   [(labels, job["committed_round"]) for labels, job in by_job]),
            family("atoll_job_rounds_aborted_total", "counter", "Aborted attempts.",
                   [(labels, job["aborted_rounds"]) for labels, job in by_job]),
            family("atoll_job_progress_ratio", "gauge", "Steps done of all.",
                   [(labels, job["progress"]["fraction"]) for labels, job in by_job]),
            family("atoll_job_held_out_loss", "gauge", "Nats per token on held-out text.",
                   [(labels, job["held_out_loss"]) for labels, job in by_job]),
            family("atoll_member_loss", "gauge", "Training loss.", of_members("loss")),
            family("atoll_member_step", "gauge", "Optimizer steps.", of_members("step")),
            family("atoll_member_tokens_per_second", "gauge", "Speed.",
                   of_members("tokens_per_s")),
            family("atoll_member_sent_bytes_total", "counter", "Sent by a member.",
                   of_members("sent_bytes")),
            family("atoll_member_received_bytes_total", "counter", "Received by a member.",
                   of_members("received_bytes")),
            family("atoll_queue_items", "gauge", "Items by state.", queue_states),
            family("atoll_relay_frames_total", "counter", "Forwarded frames.",
                   [({}, relay.get("frames"))]),
            family("atoll_relay_bytes_total", "counter", "Forwarded bytes.",
                   [({}, relay.get("bytes"))]),
            family("atoll_relay_dropped_total", "counter", "Frames nobody was there for.",
                   [({}, relay.get("dropped"))]),
            family("atoll_sessions", "gauge", "Open sessions.", [({}, relay.get("sessions"))]),
        ]
    )  # fmt: skip


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
