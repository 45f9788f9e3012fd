"""Alarm rules on the stages of a SWARM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.hub.alarms.engine import Finding
from atoll.hub.alarms.facts import Facts, JobFacts
from atoll.hub.swarm.view import PeerState, PeerView, SwarmView
from atoll.swarm.rebalance import rate_text
from atoll.wire.states import JobState

HELPS = 1.05
"""A further machine helps if it raises the throughput by this factor."""
RECOVERS_S = 60.0
"""A stage with members may recover its state for this long before its pause is reported."""
OFTEN = 3
"""Failures of a member in ten minutes."""


def stage_slow(facts: Facts) -> Iterator[Finding]:
    """Find the stage that all others wait for; says what one more machine would bring."""
    for job, swarm in _swarms(facts):
        rates = [stage.rows_per_s or 0.0 for stage in swarm.stages]
        slow = next((stage for stage in swarm.stages if stage.slowest), None)
        if slow is None or swarm.paused or not slow.rows_per_s or len(rates) < 2:
            continue
        next_rate = min(rate for stage, rate in zip(swarm.stages, rates, strict=True)
                        if stage is not slow)  # fmt: skip
        peers = slow.serving
        slowest = min(peers, key=lambda peer: peer.rows_per_s or float("inf"))
        with_one = min(next_rate, slow.rows_per_s * (1 + 1 / len(peers)))
        like = "it" if len(peers) == 1 else "these"
        more = f"one more like {like} would bring {rate_text(with_one)}"
        if with_one < HELPS * slow.rows_per_s:
            more = f"one more like {like} would bring little: {rate_text(with_one)}"
        yield Finding(
            kind="stage-slow",
            job=job.job,
            member=slowest.member,
            node=slowest.node,
            key=str(slow.stage),
            value=slow.rows_per_s,
            cause=f"stage {slow.stage} holds all up: {_machines(peers)} at "
            f"{rate_text(slow.rows_per_s)} rows/s, the next slowest stage does "
            f"{rate_text(next_rate)}; {more}",
            remedy="join another machine (atoll ticket): it goes to the slowest stage; or let "
            "members change places more often (rebalance_s in [swarm])",
        )


def stage_alone(facts: Facts) -> Iterator[Finding]:
    """Find stages with a single member: they have no spare."""
    for job, swarm in _swarms(facts):
        alone = [stage for stage in swarm.stages if len(stage.peers) == 1]
        if not alone or swarm.paused:
            continue
        spare = any(len(stage.serving) > 1 for stage in swarm.stages)
        shown = ", ".join(f"{stage.stage} ({stage.peers[0].name})" for stage in alone)
        one = len(alone) == 1
        then = "a member of another stage takes its place, from the newest checkpoint"
        if not spare:
            then = "the job waits for another machine"
        yield Finding(
            kind="stage-alone",
            job=job.job,
            node=alone[0].peers[0].node if one else "",
            member=alone[0].peers[0].member if one else "",
            value=float(len(alone)),
            cause=f"stage{'' if one else 's'} {shown} {'has' if one else 'have'} a single member"
            f"{'' if one else ' each'}: if it goes, {then}",
            remedy=f"join {_plural(len(alone), 'more machine')} (atoll ticket), or run with fewer "
            "stages (stages in [swarm])",
        )


def swarm_paused(facts: Facts) -> Iterator[Finding]:
    """Find SWARMs that wait for a member of a stage, or for the state of one."""
    for job, swarm in _swarms(facts):
        vacant = [stage for stage in swarm.empty if not swarm.stages[stage].peers]
        if not swarm.paused or not (vacant or swarm.waits_s > RECOVERS_S):
            continue
        needs = max((swarm.stages[stage].needs_bytes for stage in vacant), default=0)
        least = f" with at least {needs / 1e9:.1f} GB of free memory" if needs else ""
        remedy = f"join a machine{least} (atoll ticket): it takes this stage and the job goes on"
        if not vacant:
            (peer, *_) = swarm.stages[swarm.empty[0]].peers
            remedy = (
                f"read why: atoll logs {job.job} --member {peer.member}; without a checkpoint of "
                'the stage: lost_stage = "neighbours" in [swarm], or atoll resume from an earlier '
                "round"
            )
        yield Finding(
            kind="swarm-paused",
            severity="critical",
            job=job.job,
            value=float(len(swarm.empty)),
            cause=f"{job.job} waits: {swarm.paused}",
            remedy=remedy,
        )


def member_banned(facts: Facts) -> Iterator[Finding]:
    """Find members that fail again and again."""
    for job, swarm in _swarms(facts):
        for stage in swarm.stages:
            for peer in stage.peers:
                if peer.failures < OFTEN:
                    continue
                said = f": {peer.last_failure}" if peer.last_failure else ""
                now = " (banned now)" if peer.state == PeerState.BANNED else ""
                yield Finding(
                    kind="member-banned",
                    job=job.job,
                    member=peer.member,
                    node=peer.node,
                    value=float(peer.failures),
                    cause=f"{peer.name} failed {peer.failures} times in ten minutes in stage "
                    f"{stage.stage} and was banned each time{now}{said}",
                    remedy="read its output, look at its connection: "
                    f"atoll logs {job.job} --member {peer.member}; or take it out: "
                    f"atoll drain {peer.node}",
                )


def stage_fails(facts: Facts) -> Iterator[Finding]:
    """Find stages that no microbatch passes, because every member that tries fails."""
    for job, swarm in _swarms(facts):
        for stage in swarm.stages:
            failed = [peer for peer in stage.serving if peer.failures]
            if stage.failed_in_a_row < OFTEN or not failed or swarm.paused:
                continue
            if any(peer.state == PeerState.READY and not peer.failures for peer in stage.serving):
                continue  # it takes the microbatches instead
            newest = max(failed, key=lambda peer: peer.failures)
            alone = ", its only member" if len(stage.serving) == 1 else ""
            who = ", ".join(peer.name for peer in failed[:4])
            said = f": {newest.last_failure}" if newest.last_failure else ""
            yield Finding(
                kind="stage-fails",
                severity="critical",
                job=job.job,
                member=newest.member,
                node=newest.node,
                key=str(stage.stage),
                value=float(stage.failed_in_a_row),
                cause=f"no microbatch comes through stage {stage.stage}: {who}{alone}, failed "
                f"{stage.failed_in_a_row} times since the last one{said}",
                remedy=f"read why: atoll logs {job.job} --member {newest.member}; take the machine "
                f"out, so that another one takes the stage: atoll drain {newest.node}; or join "
                "another machine (atoll ticket)",
            )


def _swarms(facts: Facts) -> Iterator[tuple[JobFacts, SwarmView]]:
    for job in facts.jobs:
        if job.state == JobState.RUNNING and job.swarm is not None:
            yield job, job.swarm


def _machines(peers: Sequence[PeerView]) -> str:
    named = ", ".join(peer.name for peer in peers[:4])
    return f"{_plural(len(peers), 'machine')} ({named}{', ...' if len(peers) > 4 else ''})"


def _plural(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
