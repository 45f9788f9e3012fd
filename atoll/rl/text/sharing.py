"""Policies that learn from each other's completions: texts travel, never weights.

SAPO, Swarm sAmpling Policy Optimization (https://arxiv.org/abs/2509.08721): a batch has groups of
completions that the policy wrote itself, and groups that others with the same task wrote. Groups of
others in which all rewards are equal teach nothing and are left out; of the rest some are drawn.
A receiver tokenizes the texts anew and takes their log-probabilities under its own weights, so the
clipped ratio begins at 1.

Differs from the paper:
  * a receiver scores texts with its own task: neither rewards nor answers travel;
  * a group is learned from once by each receiver, and only the newest groups of a policy wait;
  * clip and penalty are those of `[rl]`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from atoll.errors import ConfigError, DataError
from atoll.rl import seeds
from atoll.rl.text import rewards
from atoll.rl.text.episodes import Episodes
from atoll.rl.text.language_policy import LanguagePolicy
from atoll.rl.text.prompts import END, Prompts, padded
from atoll.rl.text.sampler import Written

log = logging.getLogger(__name__)

_LONGEST = 1 << 16
"""Characters of a text."""
_EQUAL = "equal"

_Text = Annotated[str, msgspec.Meta(max_length=_LONGEST)]


class _Group(msgspec.Struct, frozen=True):
    """A prompt, and completions; `ended`: which of them did."""

    prompt: _Text
    completions: list[_Text]
    ended: list[bool]


class _Message(msgspec.Struct, frozen=True):
    """A batch of one policy as text."""

    policy: str
    task: str
    groups: Annotated[list[_Group], msgspec.Meta(max_length=1 << 12)]


@dataclass(slots=True)
class Scored:
    """A group of another policy as this one reads it."""

    episodes: Episodes
    """Its completions; log-probabilities are zeros."""
    learned: bool = False


class Exchange:
    """One policy's part: the texts of its batches for the others, and theirs for it."""

    def __init__(self, policy: LanguagePolicy, *, task: str, seed: int) -> None:
        """`task` is what policies that share have in common."""
        self._policy, self._task, self._seed = policy, task, seed
        self._waiting: dict[str, list[Scored]] = {}
        """The newest groups of each other policy."""
        self.dropped: dict[str, int] = {}
        """Groups of others that were not learned from, by reason."""

    @property
    def unusable(self) -> dict[str, int]:
        """`dropped` without groups of equal rewards, which are no error."""
        return {why: count for why, count in self.dropped.items() if why != _EQUAL}

    def message(self, episodes: Episodes) -> dict[str, Any]:
        """Return a batch of this policy as text, for a topic."""
        wording, size = self._policy.wording, self._policy.rl.group
        groups = []
        for first in range(0, len(episodes.tokens), size):
            texts, ended = [], []
            for row in range(first, first + size):
                start, length = int(episodes.prompts[row]), int(episodes.lengths[row])
                tokens = episodes.tokens[row]
                whole = wording.tokenizer.decode(tokens[start : start + length])
                text, end, _ = whole.partition(END)
                texts.append(text.decode("utf-8", errors="surrogateescape"))
                ended.append(bool(end))
            prompt = wording.tokenizer.decode(
                episodes.tokens[first, : int(episodes.prompts[first])]
            )
            groups.append(_Group(prompt.decode("utf-8", errors="replace"), texts, ended))
        message: dict[str, Any] = msgspec.to_builtins(
            _Message(self._policy.name, self._task, groups)
        )
        return message

    def take(self, value: object) -> None:
        """Take a message of another policy; its groups replace that policy's waiting ones.

        What does not fit is counted in `dropped`.
        """
        try:
            message = msgspec.convert(value, _Message)
        except msgspec.ValidationError:
            self.drop("damaged")
            return
        if message.task != self._task or message.policy == self._policy.name:
            return
        found = [self._read(group) for group in message.groups]
        self._waiting[message.policy] = [one for one in found if one is not None]

    def with_others(self, own: Episodes) -> Episodes:
        """Return a batch of this policy, and up to `share` groups of others, drawn at random."""
        policy = self._policy
        usable = [
            one for name in sorted(self._waiting) for one in self._waiting[name] if not one.learned
        ]
        draw = seeds.source("shared", self._seed, policy.name, policy.learner.version)
        chosen = draw.sample(usable, min(policy.rl.share, len(usable)))
        parts = [own]
        for one in chosen:
            one.learned = True
            parts.append(self._on_policy(one.episodes))
        return _joined(parts)

    def drop(self, why: str) -> Scored | None:
        """Count a group that cannot be used; return None."""
        self.dropped[why] = self.dropped.get(why, 0) + 1
        return None

    def _read(self, group: _Group) -> Scored | None:
        """Return a scored group of another policy; None if it cannot be used, which is counted."""
        policy, size = self._policy, self._policy.rl.group
        if len(group.completions) != size or len(group.ended) != size:
            return self.drop("damaged")
        wording, most = policy.wording, policy.rl.max_tokens
        try:
            prompts = wording.encode([group.prompt] * size, room=policy.room)
            texts = [
                text.encode(errors="surrogateescape") + END * ended
                for text, ended in zip(group.completions, group.ended, strict=True)
            ]
        except ConfigError:
            return self.drop("long")
        except UnicodeEncodeError:
            return self.drop("damaged")
        ids = [wording.tokenizer.encode(text).long() for text in texts]
        if not all(1 <= len(one) <= most for one in ids):
            return self.drop("long")
        try:
            episodes = self._episodes(prompts, ids)
        except DataError:  # a reward that is not finite
            return self.drop("not_finite")
        except Exception:  # a task's reward may be anything for prompts that it never gives
            if "damaged" not in self.dropped:
                log.warning("a task cannot score what another policy sent", exc_info=True)
            return self.drop("damaged")
        if bool((episodes.scores == episodes.scores[0]).all()):
            return self.drop(_EQUAL)
        return Scored(episodes)

    def _episodes(self, prompts: Prompts, ids: list[Tensor]) -> Episodes:
        rows = [
            torch.cat((prompt[:length], completion))
            for prompt, length, completion in zip(
                prompts.tokens, prompts.lengths.tolist(), ids, strict=True
            )
        ]
        lengths = torch.tensor([len(one) for one in ids])
        nothing = torch.zeros(len(ids), int(lengths.max()))
        written = Written(padded(rows), lengths, nothing)
        policy = self._policy
        return Episodes(
            policy=policy.name, tokens=written.tokens, prompts=prompts.lengths, lengths=lengths,
            log_probabilities=nothing, rewards=nothing.clone(),
            scores=rewards.scores(policy.task, prompts, written, policy.wording),
        )  # fmt: skip

    def _on_policy(self, episodes: Episodes) -> Episodes:
        """Return a group with the log-probabilities of this policy as it is."""
        found = self._policy.current(episodes)
        return replace(episodes, log_probabilities=found * episodes.mask)


def _joined(parts: list[Episodes]) -> Episodes:
    """Return batches as one, with the header of the first."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.tokens.shape[1] for part in parts)
    steps = max(part.log_probabilities.shape[1] for part in parts)

    def flat(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    def together(name: str, width: int) -> Tensor:
        rows = [getattr(part, name) for part in parts]
        return torch.cat([functional.pad(one, (0, width - one.shape[1])) for one in rows])

    return replace(
        parts[0], tokens=together("tokens", longest),
        log_probabilities=together("log_probabilities", steps),
        rewards=together("rewards", steps),
        prompts=flat("prompts"), lengths=flat("lengths"), scores=flat("scores"),
    ).check()  # fmt: skip
