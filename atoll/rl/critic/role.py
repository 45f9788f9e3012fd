"""The critic's process: takes experience of all actors, learns from it, and publishes weights."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from atoll.checkpoint import save_weights
from atoll.config import JobSpec
from atoll.errors import ConfigError, DataError
from atoll.rl.channel.critic import CriticChannel, Decode, Received
from atoll.rl.channel.messages import decode_trajectory
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.state_saver import StateSaver
from atoll.rl.trajectory import Trajectory
from atoll.run import Run

log = logging.getLogger(__name__)

TOGETHER_S = 0.2
"""How long an update waits for experience of every running actor."""

EACH = 4
"""Largest number of trajectories of one update, per running actor."""

IDLE_SAVE_S = 5.0
"""Time without experience after which a save releases all leases."""

LEAVE_SAVE_S, END_SAVE_S = 3.0, 60.0
RATE_S = 5.0
Figures = Mapping[str, Mapping[str, float]]
"""By policy, then by name."""

SHOWN = 12
"""Largest number of policies with figures of their own in a point."""


class SharedLearner(Protocol):
    """What is trained: a critic, or a critic and all policies."""

    name: str
    """The role: `critic` or `learner`."""

    @property
    def module(self) -> nn.Module:
        """The trained networks."""
        ...

    @property
    def version(self) -> int:
        """Number of updates."""
        ...

    def add_policy(self, spec: TaskSpec) -> None:
        """Add a policy, unless it is known.

        Raises:
            ConfigError: the policy cannot be learned.
        """
        ...

    def learn(self, trajectories: Sequence[Trajectory], side: CriticChannel) -> dict[str, Any]:
        """Do one update; return figures by policy."""
        ...

    def publish(self, side: CriticChannel) -> None:
        """Publish the weights in the background."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next update depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        ...


class CriticRole:
    """Takes experience, trains a learner, publishes weights, saves, and acknowledges.

    Experience stays leased until a saved state contains it, so a successor of a dead critic gets it
    again.
    """

    def __init__(
        self, spec: JobSpec, run: Run, learner: SharedLearner, *,
        decode: Decode = decode_trajectory,
    ) -> None:  # fmt: skip
        """Start to listen; `decode` returns the experience in a message."""
        self._rl, self._run, self._learner = spec.rl, run, learner
        self._keeper = StateSaver(run, member=run.member)
        self._side = CriticChannel(
            run, rl=spec.rl, job=run.job, decode=decode, stopping=lambda: run.stopping
        )
        self._refused: set[str] = set()
        self._learned = 0
        self._learned_at = time.monotonic()
        self._unpublished = False
        self._update_s: deque[float] = deque(maxlen=50)
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def run(self) -> dict[str, Any]:
        """Learn until all actors are done or a stop is requested; return the summary's part."""
        run, side = self._run, self._side
        state = self._keeper.newest()
        if state is not None:
            self._resume(state)
        run.track(self._learner.module)
        # Actors wait for the weights of a resumed critic.
        if self._learner.version:
            self._learner.publish(side)
        while not run.stopping:
            received = self._take()
            if received:
                self._learn(received)
            elif self._is_over():
                break
            else:
                self._rest()
        return self._end()

    # ------------------------------------------------------------------------- actors

    def _resume(self, state: Mapping[str, Any]) -> None:
        self._learner.load_state_dict(state["learner"])
        self._side.load_state_dict(state["side"])
        self._learned = int(state["learned"])
        self._marks = deque([(time.monotonic(), self._learned)])
        log.info("continues after %d updates", self._learner.version)

    def _welcome(self) -> None:
        """Add the policies that were announced."""
        newcomers = self._side.newcomers()
        for spec in newcomers:
            try:
                self._learner.add_policy(spec)
            except ConfigError as error:
                self._refused.add(spec.policy)
                self._run.tell("policy-refused", f"policy {spec.policy} is refused: {error}")
            else:
                self._refused.discard(spec.policy)
                self._run.tell("policy-joined", f"policy {spec.policy}: {spec.task}")
        if newcomers:
            self._publish()

    def _is_over(self) -> bool:
        """Return whether no experience will arrive; a pool's own critic job waits for a stop."""
        actors = sum(policy.actors for policy in self._rl.policies)
        return actors > 0 and self._side.ended(expected=actors)

    # ------------------------------------------------------------------------- learning

    def _take(self) -> list[Received]:
        """Return experience of all running actors, or of those that were fast enough."""
        actors = max(1, len(self._side.running))
        found = self._side.take(EACH * actors, wait_s=TOGETHER_S, least=actors)
        self._welcome()  # after taking: it may contain new actors
        known = [one for one in found if one.trajectory.policy not in self._refused]
        self._side.counts["refused"] += len(found) - len(known)
        return known

    def _learn(self, received: Sequence[Received]) -> None:
        learner, side, began = self._learner, self._side, time.monotonic()
        try:
            stats = learner.learn([one.trajectory for one in received], side)
        except DataError as error:
            side.counts["not_finite"] += len(received)
            self._run.tell("experience-dropped", str(error))
            return
        self._learned_at = time.monotonic()
        self._update_s.append(self._learned_at - began)
        self._learned += len(received)
        self._unpublished = True
        if learner.version % self._rl.push_every == 0:
            self._publish()
        if learner.version % self._rl.save_every == 0 or side.should_save:
            self._save()
        self._report(received, stats)

    def _rest(self) -> None:
        """Publish and save what is pending while no experience arrives."""
        idle_s = time.monotonic() - self._learned_at
        if idle_s > TOGETHER_S and self._unpublished:
            self._publish()
        if idle_s > IDLE_SAVE_S and self._side.unsaved:
            self._learned_at = time.monotonic()
            self._save()
        self._run.stepped(0)

    def _publish(self) -> None:
        self._learner.publish(self._side)
        self._unpublished = False

    def _save(self) -> None:
        """Save in the background; its experience is acknowledged once the state is durable."""
        state = {
            "learner": self._learner.state_dict(), "side": self._side.state_dict(),
            "learned": self._learned,
        }  # fmt: skip
        self._keeper.save(state, then=self._side.settling())

    # ------------------------------------------------------------------------- reports

    def _report(
        self, received: Sequence[Received], stats: Mapping[str, Mapping[str, float]]
    ) -> None:
        side, now = self._side, time.monotonic()
        self._marks.append((now, self._learned))
        while len(self._marks) > 2 and now - self._marks[1][0] > RATE_S:
            self._marks.popleft()
        (began, before), depth = self._marks[0], side.depth
        losses = [about["value_loss"] for about in stats.values() if "value_loss" in about]
        values = {
            "updates": float(self._learner.version), "value_version": float(self._learner.version),
            "trajectories": float(self._learned),
            "trajectories_per_s": (self._learned - before) / max(1e-9, now - began),
            "queue_depth": float(sum(depth.values())),
            "staleness": sum(one.age for one in received) / len(received),
            "dropped": float(sum(self._dropped().values())),
            "sent_bytes": float(side.sent_bytes),
            "update_s": sum(self._update_s) / len(self._update_s),
        }  # fmt: skip
        if losses:
            values["value_loss"] = sum(losses) / len(losses)
        for policy in list(stats)[:SHOWN]:
            for name in ("value_loss", "explained_variance"):
                if name in stats[policy]:
                    values[f"{name}.{policy}"] = stats[policy][name]
        self._run.log(tokens=sum(one.trajectory.steps for one in received), **values)
        self._run.stepped()

    def _dropped(self) -> dict[str, int]:
        kinds = ("stale", "duplicate", "not_finite", "damaged", "refused")
        counts = {kind: self._side.counts[kind] for kind in kinds if self._side.counts[kind]}
        return counts | ({"oldest": self._side.lost} if self._side.lost else {})

    # ------------------------------------------------------------------------- end

    def _end(self) -> dict[str, Any]:
        """Publish and save; after the last experience also publish the weights as a file."""
        run, learner, side = self._run, self._learner, self._side
        over = not run.stopping
        if self._unpublished:
            self._publish()
        self._save()
        if not self._keeper.flush(timeout_s=END_SAVE_S if over else LEAVE_SAVE_S):
            log.warning("the last state was not saved in time")
        if over and learner.version:
            path = run.directory / f"{learner.name}.safetensors"
            save_weights(path, learner.module.state_dict(), about={"updates": str(learner.version)})
            run.publish(path, path.name)
        result = {
            "role": learner.name, "policy": "", "env": "", "env_steps": 0, "episodes": 0,
            "return_first": None, "return_last": None, "return_best": None,
            "updates": learner.version, "value_version": learner.version,
            "trajectories": self._learned, "dropped": self._dropped(),
            "staleness": {str(age): count for age, count in sorted(side.staleness.items())},
            "queue_wait_s": 0.0, "sent_bytes": side.sent_bytes, "gif": "",
        }  # fmt: skip
        side.close(timeout_s=LEAVE_SAVE_S)
        self._keeper.close(timeout_s=LEAVE_SAVE_S)
        return result
