"""Views of a job for the REST interface: record, latest metrics and live sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from atoll.config.loss_unit import loss_unit
from atoll.hub.http.progress import progress_of
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.jobs.people import standstill, starting
from atoll.hub.nodes.store import Node
from atoll.hub.observability.held_out import HELD_OUT_LOSS, HELD_OUT_LOSS_SUM, HELD_OUT_TOKENS
from atoll.hub.observability.latest import Latest
from atoll.hub.observability.traffic import Bytes
from atoll.hub.sessions.session import Session
from atoll.ids import member_id, member_of_follower
from atoll.wire.states import JobState, MemberState, NodeState

NOTHING_SENT = Bytes()

_SILENT: dict[str, Any] = {
    "last_seen_s": None, "sent_bytes": 0, "received_bytes": 0, "connected": False,
}  # fmt: skip


def job_view(
    job: Job,
    *,
    latest: Mapping[str, Latest],
    live: Mapping[str, Mapping[str, Any]],
    traffic: Bytes = NOTHING_SENT,
    swarm: Mapping[str, Any] | None = None,
    now: float = 0.0,
) -> dict[str, Any]:
    """Return a job as the API shows it.

    Args:
        job: Its record.
        latest: Newest metrics by member.
        live: Session state by member, see `LiveHub.members`.
        traffic: What all its members, former ones included, have sent and received.
        swarm: View of a SWARM; None for other jobs.
        now: The time, as Unix time.
    """
    ordered = sorted(job.members.values(), key=lambda member: member.slot)
    members = [
        member_view(member, latest.get(member.member, Latest()), live.get(member.member, _SILENT))
        for member in ordered
    ]
    running = [view for view in members if view["state"] == MemberState.RUNNING]
    return {
        "job": job.job,
        "state": job.state,
        "reason": job.reason,
        "error": job.error,
        "nodes_wanted": job.nodes_wanted,
        "min_nodes": job.min_nodes,
        "paused": bool(standstill(job)) and job.state == JobState.RUNNING,
        "paused_reason": standstill(job),
        "starting": starting(job),
        "members": members,
        "members_placed": len(members),
        "members_running": len(running),
        "machines": job.machines,
        "followers": [
            follower_view(follower)
            for follower in sorted(job.followers.values(), key=_in_order)
            if member_of_follower(follower.member)[1]
            < job.machines  # the rest belongs to an earlier job file
        ],
        "committed_round": job.committed_round,
        "aborted_rounds": job.aborted_rounds,
        "created": job.created,
        "started": job.started,
        "ended": job.ended,
        "spec": job.text,
        "files": job.files,
        "verified": job.spec.job.trust == "audit",
        "tuned": job.spec.tune.active,
        "loss_unit": loss_unit(job.spec),
        "resume_round": job.resume_round,
        "stopping": job.stopping,
        "result": job.result,
        "progress": progress_of(job, latest, swarm=swarm, now=now),
        "loss": _mean([view["loss"] for view in running or members]),
        "held_out_loss": _held_out(latest),
        "tokens_per_s": sum(view["tokens_per_s"] or 0.0 for view in running),
        "speed": _speed(members),
        "sent_bytes": int(traffic.sent),
        "received_bytes": int(traffic.received),
    }


def job_row(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return the view without its long parts, for lists."""
    long = ("spec", "members", "followers", "result", "files", "swarm", "paths")
    return {name: value for name, value in view.items() if name not in long}


def member_view(member: Member, latest: Latest, live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the view of one member."""
    return {
        "member": member.member,
        "node": member.node,
        "state": member.state,
        "slot": member.slot,
        "attempt": member.attempt,
        "step": latest.step,
        "round": latest.round,
        "loss": latest.values.get("loss"),
        "tokens_per_s": latest.values.get("tokens_per_s"),
        "values": latest.values,
        "sent_bytes": live["sent_bytes"],
        "received_bytes": live["received_bytes"],
        "last_seen_s": live["last_seen_s"],
        "connected": live["connected"],
        "round_state": live.get("round_state"),
        "pace": live.get("pace"),
        "exit_code": member.exit_code,
        "error": member.error,
        "tail": member.tail,
        "collecting": member.collecting,
        "result": member.result,
    }


def follower_view(follower: Member) -> dict[str, Any]:
    """Return the view of a follower; its metrics are reported as the member's."""
    view = member_view(follower, Latest(), _SILENT)
    return view | {"follower_of": member_id(follower.slot), "step": None, "round": None}


def _in_order(follower: Member) -> tuple[int, int]:
    return follower.slot, member_of_follower(follower.member)[1]


def _speed(members: list[dict[str, Any]]) -> float | None:
    """Return the tokens per second of all members over their training; None: unknown."""
    totals = [(m["values"].get("tokens"), m["values"].get("wall_s")) for m in members]
    rates = [tokens / seconds for tokens, seconds in totals if tokens and seconds]
    return sum(rates) or None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _held_out(latest: Mapping[str, Latest]) -> float | None:
    """Return the newest held-out loss: a whole evaluation, else the members' shares added.

    Which member measures may change from one evaluation to the next.
    """
    measured = [one for one in latest.values() if HELD_OUT_LOSS in one.values]
    newest = max(measured, key=lambda one: one.evaluated, default=None)
    if newest:
        return newest.values[HELD_OUT_LOSS]
    step = max((one.evaluated for one in latest.values()), default=-1)
    shares = [one.values for one in latest.values() if step >= 0 and one.evaluated == step]
    tokens = sum(values.get(HELD_OUT_TOKENS, 0.0) for values in shares)
    loss_sum = sum(values.get(HELD_OUT_LOSS_SUM, 0.0) for values in shares)
    return loss_sum / tokens if tokens else None


def describe_member(session: Session | None, now: float, *, traffic: Bytes) -> dict[str, Any]:
    """Return the live state of a member."""
    return {
        "last_seen_s": max(0.0, now - session.last_seen) if session else None,
        "sent_bytes": int(traffic.sent),
        "received_bytes": int(traffic.received),
        "connected": session is not None and session.connected,
    }


def describe_node(
    node: Node,
    session: Session | None,
    now: float,
    *,
    running: list[str],
    measured: Sequence[Mapping[str, float]],
    traffic: Bytes,
) -> dict[str, Any]:
    """Return a node for the API; `measured` are the latest metrics of its workers."""
    last_seen = session.last_seen if session else node.last_seen
    stats = session.stats if session else node.stats
    gone = NodeState.LEFT if node.left else NodeState.LOST
    connection = NodeState.ONLINE if session and node.connected else gone
    return {
        "node": node.node,
        "name": node.info.hostname or node.node,
        "state": connection,
        "shown": _shown(node, connection, busy=bool(running)),
        "draining": node.draining,
        "drain_reason": node.drain_reason,
        "last_seen_s": max(0.0, now - last_seen),
        "info": cast(Any, {name: getattr(node.info, name) for name in node.info.__struct_fields__}),
        "stats": stats,
        "sent_bytes": int(traffic.sent),
        "received_bytes": int(traffic.received),
        "tokens_per_s": sum(figures.get("tokens_per_s", 0.0) for figures in measured),
        "running": running,
    }


def _shown(node: Node, connection: NodeState, *, busy: bool) -> NodeState:
    """Return the state of a node in one word, for people."""
    if connection != NodeState.ONLINE:
        return connection
    if node.info.offer is not None and node.info.offer.paused:
        return NodeState.PAUSED
    if node.draining:
        return NodeState.DRAINING if busy else NodeState.DRAINED
    return NodeState.ONLINE
