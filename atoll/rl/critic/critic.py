"""The critic: one network that learns the values of many policies from all actors' experience.

A policy has a value head, and policies with observations of one kind share an encoder. An update
computes targets (GAE returns or V-trace) with the values before it, and regresses them in
minibatches in which every policy weighs the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.config.rl_tables import RlTable
from atoll.errors import CheckpointCorrupt
from atoll.rl.algorithms.ppo import in_order, minibatches
from atoll.rl.algorithms.replay import ReplayBuffer
from atoll.rl.algorithms.targets import Evaluates, Targets, corrected_targets, own_targets
from atoll.rl.algorithms.trained_policy import IN_MAIN_MEMORY
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.nets.optimizer import adam, limited_step, load_optimizer_tensors, optimizer_tensors
from atoll.rl.nets.value import Encoder, ValueNet
from atoll.rl.nets.value_heads import OWN, UNCONDITIONED, ValueHead, ValueHeads
from atoll.rl.state_saver import load_module, parts_of, prefixed
from atoll.rl.trajectory import Trajectory, ValuedTrajectory

log = logging.getLogger(__name__)

CORRECTED = "corrected"
LARGEST_TARGET = 1e12
"""Larger values are taken for an error of an environment."""


class Critic:
    """Learns and answers the values of many policies.

    An actor's own critic has one policy. One that only answers loads another's snapshots.

    `seed` decides initial weights and minibatches; `kind` is one of `CRITICS`; `device` computes.
    """

    def __init__(
        self, rl: RlTable, *, seed: int, kind: str = "", device: torch.device = IN_MAIN_MEMORY
    ) -> None:  # fmt: skip
        self.rl, self.device = rl, device
        self.kind = kind or rl.critic
        self.version = 0
        self.refused = 0
        """Trajectories not learned, because their targets were not finite or too large."""
        self._generator = torch.Generator().manual_seed(seed)
        self._evaluators: dict[str, Evaluates] = {}
        self._begin()

    def _begin(self) -> None:
        self._heads = ValueHeads(self.kind)
        self.net = ValueNet(
            self.rl.critic_hidden,
            conditioned=self.kind not in (UNCONDITIONED, OWN),
            generator=self._generator,
        ).to(self.device)
        self._optimizer: Optimizer | None = None
        self._rehearsal = ReplayBuffer()

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the known policies, in the order they were added."""
        return tuple(self._heads.by_name)

    def add_policy(self, spec: TaskSpec) -> None:
        """Add a policy; its head starts as the mean of the existing ones.

        Raises:
            ConfigError: the name is known with other spaces, or a joint critic lacks the joint
                state of this one.
        """
        if spec.policy in self._heads:
            self._heads.check_same(spec)
            return
        optimized = {id(p) for p in self._parameters()}
        self._heads.add(spec, self.net)
        self.net.to(self.device)  # new parts are drawn in main memory
        added = [p for p in self.net.parameters() if id(p) not in optimized]
        if self._optimizer is None:
            self._optimizer = adam(added, lr=self.rl.critic_lr)
        else:  # one parameter group, because fused Adam takes one call per group
            self._optimizer.param_groups[0]["params"].extend(added)

    def _parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters, in the order they were added."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def set_policy(self, name: str, policy: Evaluates) -> None:
        """Set a policy's current network: `corrected` weighs other policies' experience by it."""
        self._evaluators[name] = policy

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the values of a trajectory, for the policy that collected it."""
        return self.values_of([trajectory])[0]

    def values_of(
        self, trajectories: Sequence[Trajectory], *, policies: Sequence[str] = ()
    ) -> list[ValuedTrajectory]:
        """Return the values of several trajectories, in one pass through the network.

        `policies` are the ones to value for; by default those that collected the trajectories.
        """
        trajectories = [t.to(self.device) for t in trajectories]
        names = list(policies) or [t.policy for t in trajectories]
        heads = [self._heads[name] for name in names]
        raw = [self._heads.inputs(t, h, cut=True) for t, h in zip(trajectories, heads, strict=True)]
        answers = self._answers(raw, heads)
        out = []
        for trajectory, answer in zip(trajectories, answers, strict=True):
            length, columns = trajectory.rewards.shape
            split = (length + 1) * columns
            values = answer[:split].reshape(length + 1, columns)
            out.append(ValuedTrajectory(values, answer[split:], self.version))
        return out

    @torch.no_grad()
    def _answers(self, raw: Sequence[Tensor], value_heads: Sequence[ValueHead]) -> list[Tensor]:
        """Return values in reward units, float32, for the rows of each input."""
        if not raw:
            return []
        # The network takes the rows of one encoder side by side.
        order = sorted(range(len(raw)), key=lambda i: value_heads[i].encoder)
        inputs: list[Tensor | None] = []
        for index in range(len(self.net.encoders)):
            some = [raw[i] for i in order if value_heads[i].encoder == index]
            inputs.append(self._normalised(index, torch.cat(some)) if some else None)
        sizes = [len(raw[i]) for i in order]
        used, which = self._used_heads([value_heads[i].head for i in order], sizes)
        means, deviations = (part[used] for part in self.net.scales())
        found = self.net(inputs, used, which).double() * deviations[which] + means[which]
        parts: list[Tensor] = [found] * len(raw)
        for i, part in zip(order, found.float().split(sizes), strict=True):
            parts[i] = part
        return parts

    def _normalised(self, encoder: int, raw: Tensor) -> Tensor:
        module = self.net.encoders[encoder]
        assert isinstance(module, Encoder)
        out: Tensor = module.norm(raw)
        return out

    def learn(
        self, trajectories: Sequence[Trajectory], *, targets: Sequence[Tensor] | None = None
    ) -> dict[str, dict[str, float]]:
        """Learn from trajectories, and return figures of each policy.

        Args:
            trajectories: Of known policies, in any order; absent policies are rehearsed.
            targets: Values to regress, [T, B] each in reward units; by default GAE returns, or
                V-trace with `corrected`. With given targets nothing is rehearsed.

        Returns:
            For each policy that sent something: `value_loss` (squared error in units of its scale),
            `explained_variance` (of the targets, by the values before), `value_mean` and
            `value_scale` (its statistics), `steps`.
        """
        order = in_order(trajectories)  # the result does not depend on the order of arrival
        some = [trajectories[i].to(self.device) for i in order]
        self._see(some)
        if targets is None:
            stats = self._learn_all(some)
        else:
            goals = [targets[i].to(self.device) for i in order]
            lessons = [Targets(t, t.policy, goal) for t, goal in zip(some, goals, strict=True)]
            stats = self._study(self._sound(lessons), passes=self.rl.critic_epochs)
        self.version += 1
        return stats

    def _learn_all(self, sent: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
        """Learn from the new trajectories, and rehearse the absent policies."""
        again = self._rehearsal.absent(sent, update=self.version) if sent else []
        again = [t.to(self.device) for t in again]
        lessons = self._sound(self._lessons([*sent, *again]))
        fresh, everybody = (len({t.policy for t in part}) for part in (sent, [*sent, *again]))
        # As many passes as add up to the usual number over the new trajectories, so that rehearsal
        # does not lengthen an update.
        stats = self._study(lessons, passes=-(-self.rl.critic_epochs * fresh // max(1, everybody)))
        learned = {id(lesson.trajectory) for lesson in lessons}
        new = [t for t in sent if id(t) in learned]
        self._rehearsal.keep(new, update=self.version)
        taught = {x.policy for x in lessons if any(x.trajectory is t for t in new)}
        return {name: figures for name, figures in stats.items() if name in taught}

    def _sound(self, lessons: Sequence[Targets]) -> list[Targets]:
        return [lesson for lesson in lessons if self._is_sound(lesson)]

    def _is_sound(self, lesson: Targets) -> bool:
        """Return whether all targets are in range: an outlier would ruin all policies' values."""
        sizes = lesson.targets.abs()
        if bool((sizes <= LARGEST_TARGET).all()):
            return True
        self.refused += 1
        # Name the last step: earlier targets were computed from it.
        step, column = (~(sizes <= LARGEST_TARGET)).nonzero()[-1].tolist()
        log.warning(
            "policy %s, actor %s, trajectory %d: the value at step %d, column %d would be %g; "
            "the trajectory was not learned",
            lesson.policy, lesson.trajectory.actor, lesson.trajectory.sequence, step, column,
            float(lesson.targets[step, column]),
        )  # fmt: skip
        return False

    def _see(self, trajectories: Sequence[Trajectory]) -> None:
        """Update the encoders' normalization, each with one batch."""
        if not self.rl.normalise:
            return
        value_heads = [self._heads[t.policy] for t in trajectories]
        for index, encoder in enumerate(self.net.encoders):
            assert isinstance(encoder, Encoder)
            some = [
                self._heads.inputs(t, h, cut=False)
                for t, h in zip(trajectories, value_heads, strict=True)
                if h.encoder == index
            ]
            if some:
                encoder.norm.update(torch.cat(some))

    def _lessons(self, trajectories: Sequence[Trajectory]) -> list[Targets]:
        rl = self.rl
        if self.kind != CORRECTED:
            valued = self.values_of(trajectories)
            gammas = {name: head.spec.gamma for name, head in self._heads.by_name.items()}
            found = own_targets(trajectories, valued, gammas=gammas, lam=rl.gae_lambda)
            return [Targets(t, t.policy, part) for t, part in zip(trajectories, found, strict=True)]
        pairs = [
            (t, name)
            for name in self.policies
            for t in trajectories
            if t.policy == name or self._stands_in(t.policy, name)
        ]
        valued = self.values_of([t for t, _ in pairs], policies=[name for _, name in pairs])
        return [
            Targets(t, name, corrected_targets(
                t, answer, policy=self._evaluators.get(name),
                gamma=self._heads[name].spec.gamma, lam=rl.gae_lambda,
                rho_clip=rl.rho_clip, c_clip=rl.c_clip,
            ))
            for (t, name), answer in zip(pairs, valued, strict=True)
        ]  # fmt: skip

    def _stands_in(self, actor: str, name: str) -> bool:
        """Whether another policy's experience can be importance-weighted for this one."""
        mine, other = self._heads[name].spec, self._heads[actor].spec
        return mine.task == other.task and name in self._evaluators

    def _study(self, lessons: Sequence[Targets], *, passes: int) -> dict[str, dict[str, float]]:
        """Regress all targets, with one group of rows per policy."""
        if not lessons:
            return {}
        names = sorted({lesson.policy for lesson in lessons}, key=self._heads.place)
        value_heads = [self._heads[name] for name in names]
        raw, goals = [], []
        for name, head in zip(names, value_heads, strict=True):
            mine = [lesson for lesson in lessons if lesson.policy == name]
            raw.append(torch.cat([self._heads.inputs(x.trajectory, head, cut=False) for x in mine]))
            goals.append(torch.cat([x.targets.flatten() for x in mine]))
        before = self._answers(raw, value_heads)
        wanted = self._scaled(goals, value_heads)
        rows = [self._normalised(h.encoder, r) for r, h in zip(raw, value_heads, strict=True)]
        losses = self._regress(rows, wanted, value_heads, passes=passes)
        return {
            name: self._figures(head, goal, value, float(loss))
            for name, head, goal, value, loss in zip(
                names, value_heads, goals, before, losses, strict=True
            )
        }

    def _scaled(self, goals: Sequence[Tensor], value_heads: Sequence[ValueHead]) -> list[Tensor]:
        """Update the scale of each head with its targets, and return them in its units."""
        heads = self.net.all_heads()
        for index, head in enumerate(heads):
            some = [g for g, h in zip(goals, value_heads, strict=True) if h.head == index]
            if some:
                # Each policy weighs the same in the scale of a shared head.
                shares = [torch.full_like(g, 1.0 / len(g)) for g in some]
                head.observe(torch.cat(some), weights=torch.cat(shares))
        means, deviations = self.net.scales()
        return [
            ((goal.double() - means[value_head.head]) / deviations[value_head.head]).float()
            for goal, value_head in zip(goals, value_heads, strict=True)
        ]

    def _regress(
        self, rows: Sequence[Tensor], wanted: Sequence[Tensor], value_heads: Sequence[ValueHead],
        *, passes: int,
    ) -> Tensor:  # fmt: skip
        """Do the optimizer steps of one update; return the mean squared error, [groups]."""
        sizes = [len(part) for part in rows]
        heads = [value_head.head for value_head in value_heads]
        optimizer, parameters = self._optimizer, self._parameters()
        assert optimizer is not None
        total, steps = torch.zeros(len(rows), device=self.device), 0
        for _ in range(passes):
            for part in minibatches(
                sizes, parts=self.rl.critic_minibatches, generator=self._generator,
                device=self.device,
            ):  # fmt: skip
                picked = [r.index_select(0, i) for r, i in zip(rows, part.rows, strict=True)]
                goals = torch.cat([w[i] for w, i in zip(wanted, part.rows, strict=True)])
                used, which = self._used_heads(heads, [len(i) for i in part.rows])
                inputs = self._by_encoder(picked, value_heads)
                errors = (self.net(inputs, used, which) - goals).square()
                optimizer.zero_grad(set_to_none=True)
                (0.5 * (errors * part.weights).sum()).backward()
                if not limited_step(optimizer, parameters, max_norm=self.rl.max_norm):
                    continue
                shares = (errors.detach() * part.weights).split([len(i) for i in part.rows])
                total += torch.stack([share.sum() for share in shares]) * len(rows)
                steps += 1
        return total / max(1, steps)

    def _used_heads(self, heads: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], Tensor]:
        """Return the distinct heads, and for every row the index of its head in them."""
        used = sorted(set(heads))
        places = torch.tensor([used.index(head) for head in heads])
        return used, places.repeat_interleave(torch.tensor(sizes)).to(self.device)

    def _by_encoder(
        self, picked: Sequence[Tensor], value_heads: Sequence[ValueHead]
    ) -> list[Tensor | None]:
        out: list[Tensor | None] = []
        for index in range(len(self.net.encoders)):
            some = [p for p, h in zip(picked, value_heads, strict=True) if h.encoder == index]
            out.append(torch.cat(some) if some else None)
        return out

    def _figures(
        self, value_head: ValueHead, goal: Tensor, value: Tensor, loss: float
    ) -> dict[str, float]:
        mean, deviation = self.net.all_heads()[value_head.head].scale()
        spread = float(goal.double().var(correction=0))
        left = float((goal.double() - value.double()).var(correction=0))
        return {
            "value_loss": loss,
            "explained_variance": 1.0 - left / spread if spread > 0 else 0.0,
            "value_mean": float(mean),
            "value_scale": float(deviation),
            "steps": float(len(goal)),
        }

    def snapshot(self) -> dict[str, Tensor]:
        """Return what answering requires: weights, statistics, tasks, version."""
        return {
            "version": torch.tensor(self.version),
            "specs": self._heads.to_tensor(),
            **prefixed("net", self.net.state_dict()),
        }

    def load_snapshot(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `snapshot`; policies it lacks start as the mean of its own.

        Raises:
            CheckpointCorrupt: it is not a snapshot, or has other widths.
        """
        specs = self._heads.read(tensors)
        mine = self._heads.specs
        kept = self._heads, self.net, self._optimizer, self._rehearsal
        if [spec.policy for spec in specs] != [spec.policy for spec in mine]:
            self._begin()
            for spec in specs:
                self.add_policy(spec)
        try:
            load_module(self.net, parts_of(tensors, "net"), what="the critic")
        except CheckpointCorrupt:
            self._heads, self.net, self._optimizer, self._rehearsal = kept
            raise
        self.version = int(tensors["version"])
        for spec in mine:
            self.add_policy(spec)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that an exact resume requires."""
        kept = {} if self._optimizer is None else optimizer_tensors(self._optimizer)
        return {
            **self.snapshot(),
            **prefixed("optimizer", kept),
            **prefixed("rehearsal", self._rehearsal.state_dict()),
            "generator": self._generator.get_state().clone(),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`.

        Raises:
            CheckpointCorrupt: it is not such a state, or has other widths.
        """
        self._begin()
        self.load_snapshot(tensors)
        if self._optimizer is not None:
            load_optimizer_tensors(self._optimizer, parts_of(tensors, "optimizer"))
        self._rehearsal.load_state_dict(parts_of(tensors, "rehearsal"))
        self._generator.set_state(tensors["generator"].clone())
