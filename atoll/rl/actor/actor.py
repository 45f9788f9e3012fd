"""The actor: collects experience in its environments, improves its policy, and feeds the critic.

`Actor.run` restores a saved state, announces the actor to the critic, and then repeats rounds:
collect a trajectory, learn from it, send it to the critic, save now and then.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from atoll.checkpoint import save_weights
from atoll.config import JobSpec
from atoll.config.rl_roles import MemberRole, member_roles
from atoll.errors import AtollError, DataError, DeadlineExceeded
from atoll.rl.actor.collector import Collector
from atoll.rl.actor.learners import make_actor_learner
from atoll.rl.algorithms.a3c import ParametersOf
from atoll.rl.channel.actor import ActorChannel, spec_named
from atoll.rl.compatibility import check_tasks
from atoll.rl.critic.service import ServiceValues
from atoll.rl.environments.environment import task_of
from atoll.rl.environments.film import record
from atoll.rl.environments.vector_env import VectorEnv
from atoll.rl.seeds import seed_for
from atoll.rl.state_saver import StateSaver
from atoll.rl.trajectory import Trajectory
from atoll.run import Run
from atoll.strategies.resolve import resolve

LAST = 20
"""Number of episodes averaged in `return`."""

RATE_S = 5.0
"""Window over which steps per second are measured."""


class ActorMetrics:
    """Counts one actor's episodes, steps and updates for its points and its summary."""

    def __init__(self, *, last: int = LAST) -> None:
        """Start at zero; `return` is the mean of the last `last` episodes."""
        self._count = last
        self.env_steps = 0
        self.updates = 0
        self.episodes = 0
        self.first: list[float] = []
        """Returns of the first episodes."""
        self.best: float | None = None
        self.dropped: dict[str, int] = {}
        """Trajectories that were not learned, by reason."""
        self._last: deque[float] = deque(maxlen=self._count)
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last episodes; None if no episode has ended."""
        return sum(self._last) / len(self._last) if self._last else None

    def lived(self, steps: int, returns: Sequence[float]) -> None:
        """Count a trajectory and the episodes that ended in it."""
        self.env_steps += steps
        for value in returns:
            self.episodes += 1
            self._last.append(value)
            if len(self.first) < self._count:
                self.first.append(value)
            if len(self._last) == self._count:
                mean = sum(self._last) / self._count
                self.best = mean if self.best is None else max(self.best, mean)
        now = time.monotonic()
        self._marks.append((now, self.env_steps))
        while len(self._marks) > 2 and now - self._marks[1][0] > RATE_S:
            self._marks.popleft()

    def drop(self, reason: str) -> None:
        """Count a trajectory that was not used."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def point(self) -> dict[str, float]:
        """Return the values of a point."""
        (began, before), (now, steps) = self._marks[0], self._marks[-1]
        values = {
            "env_steps": float(self.env_steps), "episodes": float(self.episodes),
            "updates": float(self.updates), "dropped": float(sum(self.dropped.values())),
        }  # fmt: skip
        if now > began:
            values["env_steps_per_s"] = (steps - before) / (now - began)
        mean = self.mean_return
        if mean is not None:
            values["return"] = mean
            values["return_best"] = mean if self.best is None else self.best
        return values

    def result(self) -> dict[str, Any]:
        """Return the figures for the summary."""
        mean = self.mean_return
        return {
            "env_steps": self.env_steps, "episodes": self.episodes, "updates": self.updates,
            "return_first": sum(self.first) / len(self.first) if self.first else None,
            "return_last": mean, "return_best": mean if self.best is None else self.best,
            "dropped": dict(self.dropped),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return all counts, to resume."""
        return {
            "env_steps": self.env_steps, "updates": self.updates, "episodes": self.episodes,
            "first": self.first, "best": self.best, "dropped": self.dropped,
            "last": list(self._last),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        kept = dict(state)
        self._last = deque(kept.pop("last"), maxlen=self._count)
        for name, value in kept.items():
            setattr(self, name, value)
        self._marks = deque([(time.monotonic(), self.env_steps)])


log = logging.getLogger(__name__)

MOST_BAD = 10
"""Trajectories in a row with NaN or infinity after which the environment is considered broken."""

TELL_EVERY_S = 30.0
"""Shortest time between two events about dropped experience; all of it is counted."""

START_S = 60.0
"""How long an actor waits at its start for the critic."""

LEAVE_SAVE_S = 3.0
"""Time limit of the last save after a stop request; the process must leave soon."""

END_SAVE_S = 60.0


class Actor:
    """One actor of one policy."""

    def __init__(self, spec: JobSpec, run: Run, role: MemberRole, device: torch.device) -> None:
        """Make the environments and the policy, which computes on `device`.

        Raises:
            ConfigError: the environment cannot be made, or does not fit the rest.
        """
        rl = spec.rl
        self._spec, self._rl, self._run = spec, rl, run
        index = next(i for i, policy in enumerate(rl.policies) if policy.name == role.policy)
        self._table = rl.policies[index]
        number = member_roles(rl)[: run.slot].count(role)
        self._share = -(-role.steps // self._table.actors)
        """Environment steps of this actor: its share of the policy's."""
        self._columns = VectorEnv(
            self._table, count=rl.environments, seed=run.seed, policy=index, actor=number,
            joint=rl.critic == "joint",
        )  # fmt: skip
        task = task_of(self._table, rl, self._columns.environments[0])
        check_tasks(rl, [task])
        self._side: ActorChannel | None = None
        if rl.has_critic or rl.pool:
            self._side = ActorChannel(
                run, rl=rl, policy=role.policy, member=run.member, job=run.job,
                stopping=lambda: run.stopping,
            )  # fmt: skip
            task = spec_named(task, self._side.policy)
        self._task = task
        self._collector = Collector(
            self._columns, task, actor=run.member,
            seed=seed_for(run.seed, "actions", role.policy, number),
        )  # fmt: skip
        self._service: ServiceValues | None = None
        if self._side is not None and rl.values == "service":
            self._service = ServiceValues(run, rl=rl, member=run.member, job=run.job)
        self._learner = make_actor_learner(
            task, rl, side=self._side, service=self._service, total_steps=self._share,
            seed=lambda purpose: seed_for(run.seed, purpose, role.policy), device=device,
        )  # fmt: skip
        self._metrics = ActorMetrics()
        self._reported_at: dict[str, float] = {}
        self._keeper = StateSaver(run, member=run.member)

    def run(self) -> dict[str, Any]:
        """Act until all steps are done or a stop is requested; return the part of the summary."""
        run = self._run
        self._resume()
        self._enter()
        bad = rounds = 0
        while self._collector.steps < self._share and not run.stopping:
            try:
                self._one_round()
            except DataError as error:
                # One bad trajectory is dropped; many in a row mean that the environment is broken.
                bad += 1
                self._drop("not_finite", error)
                if bad >= MOST_BAD:
                    raise
                continue
            except DeadlineExceeded as error:
                # The value service may answer the next request, so drop only this trajectory.
                self._drop("unanswered", error)
                continue
            bad, rounds = 0, rounds + 1
            if rounds % self._rl.save_every == 0:
                self._keeper.save(self._state())
        return self._end()

    # ----------------------------------------------------------------------------- start

    def _resume(self) -> None:
        """Continue from the newest saved state of this member, if there is one."""
        state = self._keeper.newest()
        if state is None:
            return
        self._collector.load_state_dict(state["collector"])
        self._learner.load_state_dict(state["learner"])
        self._metrics.load_state_dict(state["diary"])
        if self._side is not None:
            self._side.load_state_dict(state["side"])
        log.info(
            "continues after %d environment steps, %d updates", self._collector.steps,
            self._learner.version,
        )  # fmt: skip

    def _enter(self) -> None:
        """Start measuring, wrap the optimizer if policies synchronize, and announce this actor."""
        run, learner, strategy = self._run, self._learner, self._spec.strategy
        if learner.optimizer is not None and not self._spec.alone:
            resolved = resolve(strategy)
            wrapped = run.wrap(
                ParametersOf(learner.module), learner.optimizer, outer=resolved.method,
                codec=resolved.codec, aggregate=strategy.aggregate,
                collective=strategy.collective, admission=strategy.admission,
            )  # fmt: skip
            learner.use(wrapped)
        else:
            run.track(learner.module, learner.optimizer)
        if self._side is not None:
            self._side.announce(self._task)
            # Values of an untrained copy would waste the first rollouts, so wait for the critic's.
            deadline = time.monotonic() + START_S
            while not self._learner.catch_up() and not run.stopping:
                if time.monotonic() > deadline:
                    run.tell("no-critic", f"the critic has been silent for {START_S:.0f} s")
                    break
                time.sleep(0.05)

    # ---------------------------------------------------------------------------- rounds

    def _one_round(self) -> None:
        """Collect a trajectory, learn from it, send it to the critic, and report."""
        # The version that acts, before learning: the critic computes the staleness from it.
        version = self._learner.version
        trajectory = self._collector.collect(self._learner.policy, self._rl.rollout)
        trajectory.policy_version = version
        self._metrics.lived(trajectory.steps, trajectory.returns)
        stats = self._learner.learn(trajectory)
        self._metrics.updates = self._learner.version
        if self._side is not None:
            self._side.send(trajectory)
            self._side.publish_policy(self._learner.policy.state_dict())
        self._report(trajectory, stats)

    def _drop(self, reason: str, error: AtollError) -> None:
        """Count dropped experience, and report it at most every `TELL_EVERY_S`."""
        self._metrics.drop(reason)
        now = time.monotonic()
        if now - self._reported_at.get(reason, -TELL_EVERY_S) >= TELL_EVERY_S:
            self._reported_at[reason] = now
            self._run.tell("experience-dropped", str(error))

    def _report(self, trajectory: Trajectory, stats: Mapping[str, float]) -> None:
        values = {**stats, **self._metrics.point()}
        side = self._side
        if side is not None:
            values |= side.figures | {"dropped": values["dropped"] + side.dropped}
        self._run.log(tokens=trajectory.steps, **values)
        self._run.stepped(trajectory.steps)

    # ------------------------------------------------------------------------------- end

    def _state(self) -> dict[str, Any]:
        """Return everything that the next rollout and update depend on."""
        state: dict[str, Any] = {
            "collector": self._collector.state_dict(), "learner": self._learner.state_dict(),
            "diary": self._metrics.state_dict(),
        }  # fmt: skip
        if self._side is not None:
            state["side"] = self._side.state_dict()
        return state

    def _end(self) -> dict[str, Any]:
        """Save; after the last step also record an episode and tell the critic of the end."""
        self._keeper.save(self._state())
        over = not self._run.stopping
        if not self._keeper.flush(timeout_s=END_SAVE_S if over else LEAVE_SAVE_S):
            log.warning("the last state was not saved in time")
        gif = ""
        if over:
            self._run.finish()
            gif = self._leave_behind()
            if self._side is not None:
                self._side.end()
        return self._result(gif)

    def _result(self, gif: str) -> dict[str, Any]:
        """Close everything; return the figures for the summary."""
        result = {
            "role": "actor", "policy": self._table.name, "env": self._table.env,
            **self._metrics.result(), "staleness": {}, "queue_wait_s": 0.0, "sent_bytes": 0,
            "gif": gif,
        }  # fmt: skip
        if self._side is not None:
            self._side.add_to(result)
            self._side.close(timeout_s=LEAVE_SAVE_S)
        self._keeper.close(timeout_s=LEAVE_SAVE_S)
        self._columns.close()
        return result

    def _leave_behind(self) -> str:
        """Publish the policy's weights and an episode; return its name, or an empty text."""
        run, name = self._run, self._table.name
        path = run.directory / f"policy-{name}.safetensors"
        save_weights(path, self._learner.policy.state_dict(), about={"policy": name})
        run.publish(path, path.name)
        if not self._rl.record:
            return ""
        picture = run.directory / f"episode-{name}.gif"
        try:
            record(self._learner.policy, self._table, picture, seed=run.seed)
            run.publish(picture, f"episodes/{name}.gif")
        except (AtollError, OSError) as error:
            run.tell("no-episode", f"no episode of {name} was recorded: {error}")
            return ""
        run.tell("episode", f"an episode of {name} was recorded")
        return f"episodes/{name}.gif"
