"""Completions that other members write: the trainer's side, and that of a rollout worker.

After every update the trainer publishes its weights as they are sampled with, in bf16, as lossless
patches of what changed (:mod:`atoll.rl.channel.versions`); of a model with adapters only these. All
members have the start model, so whole versions are patches, too: of what differs from it.
The workers write batches with the newest weights and put them into a queue. Both only dial out, and
each may be killed at any time: a batch stays in the queue until it was learned from, and a worker
that is launched again follows from the newest whole version.

A worker samples with rounded weights that may be some updates old. The log-probabilities in a batch
are those under the weights that wrote it, so the clipped ratio of PPO and GRPO accounts for both.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from torch import Tensor

from atoll.config import JobSpec
from atoll.config.rl_roles import MemberRole
from atoll.errors import DataError, DeadlineExceeded, QueueFull, WireError
from atoll.rl.channel.versions import WHOLE_EVERY, WeightReceiver, WeightSender, sampling_weights
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.text.episodes import Episodes, decode_episodes, encode_episodes
from atoll.rl.text.language_policy import LanguagePolicy
from atoll.rl.text.start import StartModel
from atoll.rl.text.trained import copied, trained_tensors
from atoll.run import Run

log = logging.getLogger(__name__)

VERSIONS_KEPT = 4 * WHOLE_EVERY
"""Versions in the topic: more than lie between two whole ones."""

WAITING_PER_WORKER = 2
"""Batches of each worker that wait in the queue; then workers wait, since batches grow old."""

ATTEMPTS = 1_000
"""Trainers that may die over one batch before it becomes a dead letter."""

LEASE_S = 600.0
"""How long a killed trainer keeps the batch that it was learning from."""

LOOK_S = 1.0
"""Longest time between two looks at whether to stop."""

SILENT_S = 60.0
"""After this wait for a batch the run reports it."""

MOST_BAD = 10
"""Failed batches in a row after which the error is considered permanent."""

REMEMBERED = 1_000


def _versions(run: Run, policy: str) -> Any:
    return run.topic(f"versions.{policy}", max_items=VERSIONS_KEPT)


def _batches(run: Run, policy: str, workers: int) -> Any:
    return run.queue(
        f"completions.{policy}", max_items=WAITING_PER_WORKER * workers, overflow="wait",
        max_attempts=ATTEMPTS,
    )  # fmt: skip


def _end(run: Run, policy: str) -> Any:
    return run.topic(f"over.{policy}", max_items=1)


def _start_of(policy: LanguagePolicy) -> dict[str, Tensor]:
    """Return the weights that all members of the policy begin with, as they are sampled with."""
    return sampling_weights(policy.reference, only=trained_tensors(policy.model))


class Collector:
    """The trainer's side: publishes weights, and takes batches. For one thread."""

    def __init__(self, run: Run, policy: LanguagePolicy, *, task: TaskSpec, workers: int) -> None:
        """Open the queue and the topics of a policy.

        Args:
            run: The trainer's run.
            policy: What learns.
            task: Its task, against which batches are checked.
            workers: How many members write for it.
        """
        self._run, self._policy, self._task = run, policy, task
        self._batches = _batches(run, policy.name, workers)
        self._sender = WeightSender(_versions(run, policy.name), start=_start_of(policy))
        self._item: Any = None
        self._learned: deque[tuple[str, int, int]] = deque(maxlen=REMEMBERED)
        self._age = 0
        self.received_bytes = 0
        self.dropped: dict[str, int] = {}
        """Batches that were not learned from, by reason."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of all versions so far."""
        return self._sender.sent_bytes

    @property
    def figures(self) -> dict[str, float]:
        """Measurements for a point."""
        return {
            "sent_bytes": float(self.sent_bytes), "received_bytes": float(self.received_bytes),
            "policy_age": float(self._age), "dropped": float(sum(self.dropped.values())),
        }  # fmt: skip

    def publish(self) -> None:
        """Publish the policy's weights; they are durable then."""
        model = self._policy.model
        weights = sampling_weights(model, only=trained_tensors(model))
        self._sender.send(weights, version=self._policy.learner.version)

    def next(self) -> Episodes | None:
        """Return a batch to learn from; None: the run was asked to stop."""
        waits_since, warned = time.monotonic(), False
        while not self._run.stopping:
            for item in self._batches.claim(lease_s=LEASE_S, wait_s=LOOK_S):
                episodes = self._usable(item)
                if episodes is not None:
                    self._item = item
                    return episodes
                item.ack()
            if not warned and time.monotonic() - waits_since > SILENT_S:
                warned = True
                self._run.tell("no-completions", f"no rollout worker has sent for {SILENT_S:.0f} s")
        return None

    def learned(self) -> None:
        """Publish the weights after an update, and acknowledge its batch."""
        self.publish()
        self._item.ack()
        self._item = None

    def end(self) -> None:
        """Tell the workers that there is nothing left to write."""
        _end(self._run, self._policy.name).publish({"over": True})

    def _usable(self, item: Any) -> Episodes | None:
        """Return the batch of an item; None if it cannot be used, which is counted by reason."""
        rl, version = self._policy.rl, self._policy.learner.version
        try:
            message = item.value
            self.received_bytes += sum(int(part.nbytes) for part in message.values())
            episodes = decode_episodes(message, self._task)
        except DataError as error:
            log.warning("%s", error)
            return self._drop("damaged")
        age = version - episodes.policy_version
        name = (episodes.actor, episodes.policy_version, episodes.sequence)
        if episodes.policy != self._policy.name or episodes.steps != rl.environments * rl.group:
            return self._drop("damaged")
        if age < 0:
            return self._drop("of_lost_weights")  # written before the trainer went back to a state
        if age > rl.staleness:
            return self._drop("stale")
        if name in self._learned:
            return self._drop("repeated")
        self._learned.append(name)
        self._age = age
        return episodes

    def _drop(self, why: str) -> Episodes | None:
        self.dropped[why] = self.dropped.get(why, 0) + 1
        return None


class RolloutWorker:
    """A member that writes completions with the newest weights of a policy.

    Raises:
        ConfigError: prompts do not fit into the model.
    """

    def __init__(self, spec: JobSpec, run: Run, role: MemberRole, beginning: StartModel) -> None:
        name = role.policy
        self._run, self._role = run, role
        self._policy = LanguagePolicy(
            name, beginning.tasks[name], copied(beginning.model), beginning.wording, spec.rl,
            episodes=role.steps, seed=run.seed,
        )  # fmt: skip
        workers = next(one.samplers for one in spec.rl.policies if one.name == name)
        self._batches = _batches(run, name, workers)
        self._receiver = WeightReceiver(
            _versions(run, name), run.member, start=_start_of(self._policy)
        )
        self._ends = _end(run, name).subscribe(f"{run.member}.over", start="oldest")
        self._over = False
        self._written = self._sent_bytes = 0

    def run(self) -> dict[str, Any]:
        """Write until the trainer is done or a stop is requested; return the summary's part."""
        run, policy = self._run, self._policy
        run.track(policy.model)
        bad = number = 0
        while not self._ended():
            if self._receiver.receive(wait_s=0.0 if self._receiver.weights else LOOK_S):
                self._load()
                number = 0
            if not self._receiver.weights:
                continue
            number += 1
            try:
                episodes = policy.write(writer=run.member, number=number)
            except DataError as error:
                bad += 1
                run.tell("experience-dropped", str(error))
                if bad >= MOST_BAD:
                    raise
                continue
            bad = 0
            episodes.actor = run.member
            if self._put(episodes):
                self._report(episodes)
        return {
            "role": self._role.role, "policy": self._role.policy, "env": self._role.env,
            "env_steps": 0, "episodes": 0, "return_first": None, "return_last": None,
            "return_best": None, "updates": self._written, "dropped": {}, "staleness": {},
            "queue_wait_s": 0.0, "sent_bytes": self._sent_bytes, "gif": "",
        }  # fmt: skip

    def _load(self) -> None:
        """Load the newest weights into the model.

        Raises:
            WireError: they are of another model.
        """
        missing = self._receiver.weights.keys() - self._policy.model.state_dict().keys()
        if missing:
            raise WireError(
                "the weights are of another model", given=", ".join(sorted(missing)[:4])
            )
        self._policy.model.load_state_dict(self._receiver.weights, strict=False)
        self._policy.learner.version = self._receiver.version

    def _put(self, episodes: Episodes) -> bool:
        """Put a batch into the queue, when there is room; return whether it is there."""
        message = encode_episodes(episodes)
        # The same version and number give the same batch, which is stored once.
        weights = f"{episodes.policy_version}.{self._receiver.digest[:16]}"
        key = f"{episodes.actor}-{weights}-{episodes.sequence}"
        put = self._batches.put_later(message, key=key, timeout_s=LEASE_S)
        while not self._ended():
            try:
                put.result(LOOK_S)
            except NotYet:
                continue
            except (QueueFull, DeadlineExceeded) as error:  # the trainer may be away for long
                log.warning("no room for a batch, it is put again: %s", error)
                put = self._batches.put_later(message, key=key, timeout_s=LEASE_S)
                continue
            self._sent_bytes += sum(int(part.nbytes) for part in message.values())
            self._written += 1
            return True
        return False

    def _report(self, episodes: Episodes) -> None:
        self._run.log(
            tokens=episodes.steps, policy_version=float(episodes.policy_version),
            score=episodes.scores.mean().item(), sent_bytes=float(self._sent_bytes),
            received_bytes=float(self._receiver.received_bytes),
        )  # fmt: skip
        self._run.stepped(episodes.steps)

    def _ended(self) -> bool:
        self._over = self._over or bool(self._ends.read(1))
        return self._over or self._run.stopping
