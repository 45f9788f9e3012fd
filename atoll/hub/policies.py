"""What differs in a job of policies: each member works for itself, and one may be the critic. Pure.

One that fails for good ends nobody else's work. The critic serves the actors, so it ends when they
have: it notices by itself when all of them are done, and is told if some of them never will be.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.config import parse_spec
from atoll.hub.jobs import LIVE_STATES, Job, Member
from atoll.hub.outcomes import End, given_up
from atoll.ids import slot_of


def hear_directly(job: Job) -> list[str]:
    """Return the live members that meet in no rounds, and hear of a stop by a message of its own.

    The critic never meets the others; actors only do where policies agree.
    """
    if not job.of_policies:
        return []
    alone = parse_spec(job.spec).alone
    live = [m.member for m in job.members.values() if m.state in LIVE_STATES]
    return sorted((m for m in live if alone or m in job.aside), key=slot_of)


def left_behind(job: Job) -> bool:
    """Return whether only the critic lives, and waits for actors that will never be done."""
    actors = [m for m in _members(job) if m.member not in job.aside]
    live = [m for m in job.members.values() if m.state in LIVE_STATES]
    waits = bool(live) and all(m.member in job.aside for m in live)
    if not waits or parse_spec(job.spec).rl.pool:  # that of a pool serves other jobs, too
        return False
    over = len(actors) > 0 and all(_is_over(m, job) for m in actors)
    return over and any(m.state != "done" for m in actors)


def outcome_of_policies(job: Job) -> End | None:
    """Return how a job of policies has ended, or None while it goes on."""
    members = _members(job)
    if any(m.state in LIVE_STATES for m in members):
        return None
    if job.stopping:
        return "stopped", "a stop was asked for", None
    if len(members) < (job.min_nodes or job.nodes_wanted):
        return None
    actors = [m for m in members if m.member not in job.aside]
    lost = [m for m in actors if _is_over(m, job) and m.state != "done"]
    if not all(_is_over(m, job) for m in actors):
        return None
    served = bool(lost) or all(_is_over(m, job) for m in members)
    if not served:
        return None
    failed = lost or [m for m in members if m.state != "done"]
    if not failed:
        return "done", "", None
    first = failed[0]
    what = (first.error or {}).get("what", "it failed again and again")
    others = f"; so did {', '.join(m.member for m in failed[1:])}" if failed[1:] else ""
    return "failed", f"{first.member}: {what}{others}", first.error


def _is_over(member: Member, job: Job) -> bool:
    """Return whether a member will not work again."""
    return member.state == "done" or given_up(member, job)


def _members(job: Job) -> list[Member]:
    found: Iterable[Member] = (m for m in job.members.values() if m.slot < job.nodes_wanted)
    return sorted(found, key=lambda m: m.slot)
