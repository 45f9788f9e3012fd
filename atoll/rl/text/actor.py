"""The actor of a language model: writes completions, learns from them, and feeds the critic."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

from atoll.checkpoint import save_weights
from atoll.checkpoint.format.weights import describe
from atoll.config import JobSpec
from atoll.config.rl_roles import MemberRole
from atoll.errors import AtollError, DataError
from atoll.models.causal_lm import CausalLM
from atoll.rl.actor.actor import ActorMetrics
from atoll.rl.channel.actor import ActorChannel
from atoll.rl.environments.spaces import DISCRETE, Actions, TaskSpec
from atoll.rl.state_saver import StateSaver
from atoll.rl.text.critic import TextCritic
from atoll.rl.text.episodes import Episodes, encode_episodes
from atoll.rl.text.language_policy import LanguagePolicy
from atoll.rl.text.rollouts import Collector
from atoll.rl.text.sharing import Exchange
from atoll.rl.text.start import LIBRARY, StartModel
from atoll.rl.text.trained import copied, trained_tensors
from atoll.run import Run

log = logging.getLogger(__name__)

MOST_BAD = 10
"""Failed batches in a row after which the error is considered permanent."""

EXAMINED = 128
"""Prompts of the evaluations before and after training."""

SHARED, SHARED_KEPT, READ_MOST = "shared", 4, 64
"""Topic of shared completions, its batches per policy, and how many are read at a time."""

SHOWN = 3
"""Completions of an evaluation in the summary."""

START_S = 60.0
"""How long an actor waits at its start for the value model."""

LEAVE_SAVE_S, END_SAVE_S = 3.0, 60.0


class TextActor:
    """One policy, its task, and its channel to the critic.

    Raises:
        ConfigError: prompts do not fit into the model.
    """

    def __init__(self, spec: JobSpec, run: Run, role: MemberRole, beginning: StartModel) -> None:
        rl, name = spec.rl, role.policy
        self._rl, self._run, self._role, self._beginning = rl, run, role, beginning
        self._policy = LanguagePolicy(
            name, beginning.tasks[name], copied(beginning.model), beginning.wording, rl,
            episodes=role.steps, seed=run.seed,
        )  # fmt: skip
        self._critic: TextCritic | None = None
        """The own value model, or a copy of the pooled one."""
        self._side: ActorChannel | None = None
        if rl.has_critic:
            names = [policy.name for policy in rl.policies]
            self._critic = TextCritic(names, beginning.model, rl, seed=run.seed)
            self._side = ActorChannel(
                run, rl=rl, policy=name, member=run.member, job=run.job, encode=encode_episodes,
                stopping=lambda: run.stopping,
            )  # fmt: skip
        elif rl.algorithm != "grpo":
            self._critic = TextCritic([name], beginning.model, rl, seed=run.seed)
        self._collector: Collector | None = None
        """Takes the completions that other members write."""
        workers = next(one.samplers for one in rl.policies if one.name == name)
        if workers:
            self._collector = Collector(run, self._policy, task=self._task(), workers=workers)
        self._exchange: Exchange | None = None
        """Shares completions with other policies of the same task."""
        if rl.share:
            word = next(one.task_word for one in rl.policies if one.name == name)
            self._exchange = Exchange(self._policy, task=word, seed=run.seed)
            self._texts = run.topic(SHARED, max_items=SHARED_KEPT * len(rl.policies))
            self._others = self._texts.subscribe(f"{run.member}.{SHARED}", start="oldest")
            self._began = time.time_ns()
        self._metrics = ActorMetrics(last=rl.environments * rl.group)
        self._keeper = StateSaver(run, member=run.member)
        self._before: float | None = None

    def run(self) -> dict[str, Any]:
        """Write and learn until all is done or a stop is requested; return the summary's part."""
        run, policy = self._run, self._policy
        self._resume()
        run.track(policy.model)
        if self._before is None:
            self._before, _ = policy.examine(EXAMINED, temperature=self._rl.temperature)
        if self._side is not None:
            self._side.announce(self._task())
            self._wait_for_values(self._side)
        if self._collector is not None:
            self._collector.publish()
        bad = 0
        while not policy.done and not run.stopping:
            try:
                self._one_round()
            except DataError as error:
                bad += 1
                self._metrics.drop("not_finite")
                run.tell("experience-dropped", str(error))
                if bad >= MOST_BAD:
                    raise
                continue
            bad = 0
            if policy.learner.version % self._rl.save_every == 0:
                self._keeper.save(self._state())
        return self._end()

    def _task(self) -> TaskSpec:
        """Return this policy's task for the critic: text of a vocabulary."""
        model = self._policy.model.config
        return TaskSpec(
            policy=self._role.policy, task=self._role.env, observation=(model.context,),
            actions=Actions(kind=DISCRETE, sizes=(model.vocab_size,)), gamma=self._rl.gamma,
            env=self._role.env,
        )  # fmt: skip

    # ------------------------------------------------------------------------- rounds

    def _one_round(self) -> None:
        """Write a batch, learn from it, send it to the critic, and report."""
        policy, critic, side = self._policy, self._critic, self._side
        collector = self._collector
        episodes = policy.write() if collector is None else collector.next()
        if episodes is None:
            return
        self._metrics.lived(episodes.steps, episodes.scores.tolist())
        if self._exchange is not None:
            episodes = self._with_others(self._exchange, episodes)
        if side is not None:
            self._follow(side)
        values = None
        if critic is not None:
            values, episodes.value_version = critic.of(episodes), critic.version
        stats = policy.improve(episodes, values)
        self._metrics.updates = policy.learner.version
        if collector is not None:
            collector.learned()
        if side is not None:
            side.send(episodes)
        elif critic is not None:
            stats["value_loss"] = critic.learn([episodes])[policy.name]["value_loss"]
        self._report(episodes, stats)

    def _with_others(self, exchange: Exchange, own: Episodes) -> Episodes:
        """Publish a batch as text, and return it with groups that others have published."""
        key = f"{own.policy}-{own.sequence}-{self._began:x}"
        self._texts.publish(exchange.message(own), key=key)
        while entries := self._others.read(READ_MOST):
            for entry in entries:
                try:
                    exchange.take(entry.value)
                except AtollError as error:  # dropped meanwhile, or damaged on its way
                    log.warning("what another policy has sent cannot be had: %s", error)
                    exchange.drop("lost")
            self._others.ack(entries[-1])
        return exchange.with_others(own)

    def _wait_for_values(self, side: ActorChannel) -> None:
        """Wait for the first weights of the value model."""
        deadline = time.monotonic() + START_S
        while not self._follow(side) and not self._run.stopping:
            if time.monotonic() > deadline:
                self._run.tell("no-critic", f"no value model has answered for {START_S:.0f} s")
                break
            time.sleep(0.05)

    def _follow(self, side: ActorChannel) -> bool:
        """Load the newest value model; return whether it is a newer one."""
        weights = side.newest_values()
        if weights is None or self._critic is None:
            return False
        try:
            self._critic.load_snapshot(weights)
        except AtollError as error:
            log.warning("the value model cannot be used, the last one is kept: %s", error)
        return True

    def _report(self, episodes: Episodes, stats: Mapping[str, float]) -> None:
        values = {**stats, **self._metrics.point()}
        if self._critic is not None:
            values["value_version"] = float(episodes.value_version)
        side = self._side
        if side is not None:
            values |= side.figures | {"dropped": values["dropped"] + side.dropped}
        if self._collector is not None:
            figures = self._collector.figures
            values |= figures | {"dropped": values["dropped"] + figures["dropped"]}
        if self._exchange is not None:
            own = self._rl.environments - self._rl.share
            values["shared_groups"] = float(episodes.steps // self._rl.group - own)
            values["dropped"] += sum(self._exchange.unusable.values())
        self._run.log(tokens=episodes.steps, **values)
        self._run.stepped(episodes.steps)

    # ------------------------------------------------------------------------- states

    def _resume(self) -> None:
        """Continue from the newest saved state of this member, if there is one."""
        state = self._keeper.newest()
        if state is None:
            return
        self._policy.load_state_dict(state["policy"])
        self._metrics.load_state_dict(state["metrics"])
        self._before = state["before"]
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])
        if self._side is not None:
            self._side.load_state_dict(state["side"])
        log.info("continues after %d updates", self._policy.learner.version)

    def _state(self) -> dict[str, Any]:
        """Return everything that the next batch and update depend on."""
        state: dict[str, Any] = {
            "policy": self._policy.state_dict(), "metrics": self._metrics.state_dict(),
            "before": self._before,
        }  # fmt: skip
        if self._critic is not None:
            state["critic"] = self._critic.state_dict()
        if self._side is not None:
            state["side"] = self._side.state_dict()
        return state

    # ------------------------------------------------------------------------- ending

    def _end(self) -> dict[str, Any]:
        """Save; after the last episode also publish the weights and tell the critic."""
        over = not self._run.stopping
        self._keeper.save(self._state())
        if not self._keeper.flush(timeout_s=END_SAVE_S if over else LEAVE_SAVE_S):
            log.warning("the last state was not saved in time")
        after: float | None = None
        texts: list[str] = []
        if over:
            after, texts = self._policy.examine(EXAMINED, temperature=self._rl.temperature)
        result = {
            "role": "actor", "policy": self._role.policy, "env": self._role.env,
            **self._metrics.result(), "staleness": {}, "queue_wait_s": 0.0, "sent_bytes": 0,
            "gif": "", "score_before": self._before, "score_after": after, "texts": texts[:SHOWN],
        }  # fmt: skip
        if over:
            self._run.finish()
            self._leave_behind()
        if self._exchange is not None:
            lost = self._exchange.unusable.items()
            result["dropped"] |= {f"shared_{why}": count for why, count in lost}
        if self._collector is not None:
            if over:
                self._collector.end()
            result["sent_bytes"] = self._collector.sent_bytes
            result["dropped"] |= self._collector.dropped
        if self._side is not None:
            if over:
                self._side.end()
            self._side.add_to(result)
            self._side.close(timeout_s=LEAVE_SAVE_S)
        self._keeper.close(timeout_s=LEAVE_SAVE_S)
        return result

    def _leave_behind(self) -> None:
        """Publish the model in a file for `start` of another job, or for `atoll generate`."""
        run, name, model = self._run, self._role.policy, self._policy.model
        kind, options = "gpt", dataclasses.asdict(model.config)
        if isinstance(model, CausalLM):
            kind, options = LIBRARY, model.portable_options()
        tokenizer = self._beginning.wording.tokenizer.to_json()
        about = describe(kind, options=options, tokenizer=tokenizer)
        path = run.directory / f"policy-{name}.safetensors"
        save_weights(path, trained_tensors(model), about=about | {"policy": name})
        run.publish(path, path.name)
