"""The value model: learns and answers the values of texts, for all policies.

A copy of the policies' start reads the text; where they learn by adapters, so does it. The policy's
embedding is added to every token, and each policy has a head with its own scale of rewards
(PopArt): values are specific to the policy, while what the network learns about texts is shared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from atoll.config.rl_tables import RlTable
from atoll.devices.choose import device_of_model
from atoll.errors import ConfigError, DataError
from atoll.models import GPT
from atoll.rl import seeds
from atoll.rl.algorithms.losses import explained_variance
from atoll.rl.channel.critic import CriticChannel
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.nets.optimizer import adam, load_optimizer_tensors, optimizer_tensors
from atoll.rl.nets.value import PopArt
from atoll.rl.state_saver import parts_of, prefixed
from atoll.rl.text.episodes import Episodes
from atoll.rl.text.rewards import token_advantages
from atoll.rl.text.sampler import TextModel, hidden_states
from atoll.rl.text.trained import copied, load_trained, trained_tensors


class ValueModel(nn.Module):
    """Values of texts, token by token.

    Args:
        policies: Names, in the same order on all members.
        model: The initial weights; copied, except for a frozen base under adapters.
        conditioned: Whether the policy is an input; if not, there is one head.
    """

    def __init__(self, policies: Sequence[str], model: TextModel, *, conditioned: bool) -> None:
        super().__init__()
        self.trunk, told, width = _reader(model)
        self.conditioned = conditioned
        self.told = nn.Parameter(torch.zeros(len(policies), told))
        self.heads = nn.ModuleList(PopArt(width) for _ in (policies if conditioned else [""]))

    def forward(self, tokens: Tensor, places: Tensor, policies: Tensor) -> Tensor:
        """Return the value before each step in the head's normalized units.

        `policies` are those of the rows, [B] int64; for the others see `Episodes`.

        Returns:
            [B, T]; undefined after the end of a completion.
        """
        added = self.told[policies] if self.conditioned else None
        states = hidden_states(self.trunk, tokens, added=added)
        states = states.gather(1, places[:, :, None].expand(-1, -1, states.shape[-1]))
        weights = torch.stack([head.weight for head in self.all_heads()])[self.head_of(policies)]
        return torch.einsum("btw,bw->bt", states, weights[:, :-1]) + weights[:, -1:]

    def all_heads(self) -> list[PopArt]:
        """Return the heads in order."""
        return [head for head in self.heads if isinstance(head, PopArt)]

    def head_of(self, policies: Tensor) -> Tensor:
        """Return the head of each policy, [B]."""
        return policies if self.conditioned else torch.zeros_like(policies)

    def scales(self, policies: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of each policy's rewards, [B, 1] float32 each."""
        both = [torch.stack(head.scale()).float() for head in self.all_heads()]
        chosen = torch.stack(both)[self.head_of(policies)]
        return chosen[:, :1], chosen[:, 1:]


def _reader(model: TextModel) -> tuple[nn.Module, int, int]:
    """Return a copy of a model without its output layer, the widths of its embedding and states."""
    if isinstance(model, GPT):
        trunk = copy.deepcopy(model).requires_grad_(True).eval()
        trunk.head = nn.Identity()  # type: ignore[assignment]  # it predicts no tokens
        return trunk, model.config.width, model.config.width
    theirs = copied(model).library_model
    ends = (theirs.get_input_embeddings(), theirs.get_output_embeddings())
    told, width = (int(end.weight.shape[1]) for end in ends)
    return theirs.base_model.eval(), told, width


@dataclass(slots=True)
class _Batch:
    """Completions of several batches, concatenated."""

    tokens: Tensor
    """[N, L]."""
    places: Tensor
    """[N, T]."""
    policies: Tensor
    """[N]."""
    mask: Tensor
    """[N, T]."""
    targets: Tensor
    """[N, T], in reward units."""
    weights: Tensor
    """[N, T]: sums to 1, with the same share for each policy."""

    def to(self, device: torch.device) -> _Batch:
        """Return it on a device."""
        return _Batch(*(getattr(self, part.name).to(device) for part in fields(self)))


class TextCritic:
    """A value model and its optimizer.

    Args:
        policies: Names of all policies.
        model: The initial weights.
        rl: `[rl]`: `critic` (`unconditioned`, or conditioned on the policy), `critic_lr`,
            `critic_epochs`, `critic_minibatches`, `gamma`, `gae_lambda`, `max_norm`.
        seed: Seed of the minibatches.
    """

    def __init__(
        self, policies: Sequence[str], model: TextModel, rl: RlTable, *, seed: int
    ) -> None:
        self.policies = tuple(policies)
        self.version = 0
        """Number of updates."""
        self._device = device_of_model(model)
        conditioned = rl.critic != "unconditioned"
        self.model = ValueModel(policies, model, conditioned=conditioned).to(self._device)
        self._rl, self._seed = rl, seed
        learned = [one for one in self.model.parameters() if one.requires_grad]
        self._optimizer = adam(learned, lr=rl.critic_lr)

    @torch.no_grad()
    def of(self, episodes: Episodes) -> Tensor:
        """Return the value before each step, [B, T], in the units of its rewards.

        Raises:
            DataError: the policy is unknown.
        """
        there = episodes.to(self._device)
        values = self._values(there.tokens, there.places, self._who(there))
        return values.to(episodes.tokens.device)

    def learn(self, batches: Sequence[Episodes]) -> dict[str, dict[str, float]]:
        """Learn from batches of any policies, in any order; every policy weighs the same.

        Returns:
            By policy: `value_loss` (in units of its deviation), `explained_variance` (of the
            targets, by the values before), `steps` (completions).

        Raises:
            DataError: a policy is unknown.
        """
        batches = sorted(batches, key=lambda b: (b.policy, b.actor, b.sequence))
        batch, stats = self._prepare(batches)
        losses = torch.zeros(len(self.policies), dtype=torch.float64)
        for number in range(self._rl.critic_epochs):
            losses = self._pass(batch, number)
        self.version += 1
        for policy, facts in stats.items():
            facts["value_loss"] = losses[self.policies.index(policy)].item()
        return stats

    def snapshot(self) -> dict[str, Tensor]:
        """Return what answering requires beside a frozen base, flat."""
        kept = prefixed("model", trained_tensors(self.model))
        return kept | {"version": torch.tensor(self.version)}

    def load_snapshot(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `snapshot`.

        Raises:
            CheckpointCorrupt: it belongs to another model or other policies.
        """
        load_trained(self.model, parts_of(tensors, "model"), what="the value model")
        self.version = int(tensors["version"])

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that an exact resume requires, flat."""
        return self.snapshot() | prefixed("optimizer", optimizer_tensors(self._optimizer))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`; raises as `load_snapshot` does."""
        self.load_snapshot(state)
        load_optimizer_tensors(self._optimizer, parts_of(state, "optimizer"))

    def _who(self, episodes: Episodes) -> Tensor:
        if episodes.policy not in self.policies:
            raise DataError(
                "the value model has no policy of this name", given=episodes.policy,
                expected=", ".join(self.policies),
            )  # fmt: skip
        number, device = self.policies.index(episodes.policy), episodes.tokens.device
        return torch.full((len(episodes.tokens),), number, device=device)

    def _values(self, tokens: Tensor, places: Tensor, policies: Tensor) -> Tensor:
        mean, deviation = self.model.scales(policies)
        found: Tensor = self.model(tokens, places, policies)
        return found * deviation + mean

    def _prepare(self, batches: Sequence[Episodes]) -> tuple[_Batch, dict[str, dict[str, float]]]:
        """Return one batch with targets by the current values, and how much these explained."""
        targets: dict[str, list[Tensor]] = {}
        values: dict[str, list[Tensor]] = {}
        rows: list[_Batch] = []
        for episodes in batches:
            now, mask = self.of(episodes), episodes.mask
            _, wanted = token_advantages(
                episodes, now, gamma=self._rl.gamma, lam=self._rl.gae_lambda
            )
            targets.setdefault(episodes.policy, []).append(wanted[mask])
            values.setdefault(episodes.policy, []).append(now[mask])
            who = self._who(episodes)
            weights = mask.to(torch.float32)
            rows.append(_Batch(episodes.tokens, episodes.places, who, mask, wanted, weights))
        flat = {policy: torch.cat(parts) for policy, parts in targets.items()}
        self._observe(flat)
        for one in rows:
            name = self.policies[int(one.policies[0])]
            one.weights /= len(flat) * len(flat[name])
        stats = {
            policy: {
                "explained_variance": explained_variance(torch.cat(values[policy]), goal).item(),
                "steps": float(sum(len(b.tokens) for b in batches if b.policy == policy)),
            }
            for policy, goal in flat.items()
        }
        return _joined(rows), stats

    def _observe(self, targets: Mapping[str, Tensor]) -> None:
        """Update the scales of the heads with the new targets."""
        heads = self.model.all_heads()
        if self.model.conditioned:
            for policy, goal in targets.items():
                heads[self.policies.index(policy)].observe(goal)
        else:
            weights = torch.cat([torch.full_like(t, 1.0 / len(t)) for t in targets.values()])
            heads[0].observe(torch.cat(list(targets.values())), weights=weights)

    def _pass(self, batch: _Batch, number: int) -> Tensor:
        """Go once over a batch; return each policy's mean loss, [policies]."""
        batch = batch.to(self._device)
        parts = min(self._rl.critic_minibatches, len(batch.tokens))
        order = seeds.generator("critic", self._seed, self.version, number)
        sums = torch.zeros(2, len(self.policies), dtype=torch.float64)
        for part in torch.randperm(len(batch.tokens), generator=order).tensor_split(parts):
            rows = part.to(self._device)
            who, mask = batch.policies[rows], batch.mask[rows]
            mean, deviation = self.model.scales(who)
            wanted = (batch.targets[rows] - mean) / deviation
            found = self.model(batch.tokens[rows], batch.places[rows], who)
            losses = 0.5 * (found - wanted).square() * mask
            loss = (losses * batch.weights[rows]).sum() * parts
            self._optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(self._optimizer.param_groups[0]["params"], self._rl.max_norm)
            self._optimizer.step()
            sums[0].index_add_(0, who.cpu(), losses.detach().cpu().double().sum(1))
            sums[1].index_add_(0, who.cpu(), mask.cpu().double().sum(1))
        return sums[0] / sums[1].clamp_min(1.0)


def _joined(rows: Sequence[_Batch]) -> _Batch:
    """Concatenate batches, padded with zeros to the widest."""

    def below(parts: list[Tensor]) -> Tensor:
        wide = max(part.shape[1] for part in parts)
        pad = torch.nn.functional.pad
        return torch.cat([pad(part, (0, wide - part.shape[1])) for part in parts])

    return _Batch(
        below([one.tokens for one in rows]), below([one.places for one in rows]),
        torch.cat([one.policies for one in rows]), below([one.mask for one in rows]),
        below([one.targets for one in rows]), below([one.weights for one in rows]),
    )  # fmt: skip


class TextCriticLearner:
    """The value model as the critic process trains it."""

    name = "critic"

    def __init__(self, critic: TextCritic) -> None:
        self._critic = critic

    @property
    def module(self) -> nn.Module:
        """The value model."""
        return self._critic.model

    @property
    def version(self) -> int:
        """Number of updates."""
        return self._critic.version

    def add_policy(self, spec: TaskSpec) -> None:
        """Check that a policy belongs to the job.

        Raises:
            ConfigError: it does not.
        """
        if spec.policy not in self._critic.policies:
            raise ConfigError(
                "the value model has no such policy", given=spec.policy,
                expected=", ".join(self._critic.policies),
            )  # fmt: skip

    def learn(self, trajectories: Sequence[Any], side: CriticChannel) -> dict[str, Any]:
        """Do one update with completions of any policies; return figures by policy."""
        return self._critic.learn(trajectories)

    def publish(self, side: CriticChannel) -> None:
        """Publish the weights."""
        side.publish(self._critic.snapshot(), version=self.version)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next update depends on."""
        return self._critic.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._critic.load_state_dict(state)
