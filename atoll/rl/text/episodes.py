"""Episodes of a language model: prompts, completions and rewards; and their messages.

A batch has B completions. Token positions run from 0 to L - 1 over prompt and completion; padding
after the end is zero and never counted. A step is one written token: step t of completion b is the
token at position `prompts[b] + t`.

A message holds per written token one byte of text (two or four with a larger vocabulary), its
log-probability and its reward, and no padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from atoll.errors import DataError
from atoll.rl.channel.messages import metadata_of, with_metadata
from atoll.rl.environments.spaces import TaskSpec


@dataclass(slots=True)
class Episodes:
    """B completions of one policy, with the header of a `Trajectory`."""

    policy: str
    """The policy that wrote them."""
    tokens: Tensor
    """[B, L], int64: prompt, completion, zeros."""
    prompts: Tensor
    """[B], int64: tokens of each prompt, at least 1."""
    lengths: Tensor
    """[B], int64: tokens of each completion with its end, at least 1."""
    log_probabilities: Tensor
    """[B, T], float32: of the written tokens, under the policy that wrote them; zeros after."""
    rewards: Tensor
    """[B, T], float32: per written token, with the penalty for leaving the reference."""
    scores: Tensor
    """[B], float32: the task's rewards."""
    sequence: int = 0
    """Number among the actor's batches, from 1."""
    actor: str = ""
    """The actor, e.g. `w1`."""
    policy_version: int = 0
    """Number of updates of the policy that wrote."""
    value_version: int = 0
    """Number of updates of the value model that the actor used."""

    def to(self, device: torch.device) -> Episodes:
        """Return them with their tensors on a device; themselves if they are there."""
        if self.tokens.device == device:
            return self
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        there: dict[str, Any] = {k: v.to(device) for k, v in parts.items() if isinstance(v, Tensor)}
        return replace(self, **there)

    @property
    def steps(self) -> int:
        """Number of completions, the unit of `steps` in `[rl]`."""
        return len(self.tokens)

    @property
    def mask(self) -> Tensor:
        """[B, T], bool: which steps were written."""
        return self._steps < self.lengths[:, None]

    @property
    def places(self) -> Tensor:
        """[B, T], int64: the position whose output chose each step; within [0, L - 1]."""
        return (self.prompts[:, None] - 1 + self._steps).clamp(max=self.tokens.shape[1] - 1)

    @property
    def written(self) -> Tensor:
        """[B, T], int64: the token of each step, zeros after the end."""
        following = (self.places + 1).clamp(max=self.tokens.shape[1] - 1)
        return self.tokens.gather(1, following) * self.mask

    def check(self) -> Episodes:
        """Return itself if its shapes fit together and every number is finite.

        Raises:
            DataError: otherwise; the policy and the completion are named.
        """
        count, length = self.tokens.shape
        steps = self.log_probabilities.shape[1]
        fits = (
            self.prompts.shape == self.lengths.shape == self.scores.shape == (count,)
            and self.log_probabilities.shape == self.rewards.shape == (count, steps)
            and count > 0
            and int(self.prompts.min()) >= 1
            and int(self.lengths.min()) >= 1
            and int(self.lengths.max()) <= steps
            and int((self.prompts + self.lengths).max()) <= length
            and int(self.tokens.min()) >= 0
        )
        if not fits:
            raise DataError(
                "completions do not fit together",
                given=f"{self._name}: {count} of {length} tokens",
                expected="as many lengths, rewards and log-probabilities as there are texts",
            )  # fmt: skip
        for name in ("log_probabilities", "rewards", "scores"):
            wrong = (~torch.isfinite(getattr(self, name))).nonzero()
            if len(wrong):
                raise DataError(
                    f"completions have {name} that are not finite",
                    given=f"{self._name}, completion {int(wrong[0, 0])}",
                    expected="finite numbers",
                    remedy="look at the task's reward; the batch was dropped",
                )
        return self

    @property
    def _steps(self) -> Tensor:
        return torch.arange(self.log_probabilities.shape[1], device=self.tokens.device)

    @property
    def _name(self) -> str:
        return f"policy {self.policy}, actor {self.actor or '?'}, batch {self.sequence}"


KIND = "episodes"
MAX_TOKENS = 2**24
"""Most tokens of one message, with padding."""

_HEADER: Mapping[str, type] = {
    "policy": str, "actor": str, "sequence": int, "policy_version": int, "value_version": int,
}  # fmt: skip


def encode_episodes(episodes: Episodes) -> dict[str, Tensor]:
    """Return a batch of completions as a message that shares no memory with it."""
    mask, whole = episodes.mask, _whole(episodes.prompts, episodes.lengths)
    header = {name: getattr(episodes, name) for name in _HEADER}
    message = {
        "tokens": _narrow(episodes.tokens[:, : whole.shape[1]][whole]),
        "prompts": episodes.prompts.to(torch.int32),
        "lengths": episodes.lengths.to(torch.int32),
        "log_probabilities": episodes.log_probabilities[mask].to(torch.float32),
        "rewards": episodes.rewards[mask].to(torch.float32),
        "scores": episodes.scores.to(torch.float32, copy=True),
    }
    return with_metadata(message, KIND, **header)


def decode_episodes(message: Mapping[str, Tensor], spec: TaskSpec | None) -> Episodes:
    """Return the completions in a message.

    Args:
        message: The result of `encode_episodes`.
        spec: The task of its policy, to check text length and vocabulary against; None if unknown.

    Raises:
        DataError: it is something else, of another version, does not fit its task or has numbers
            that are not finite; the policy and the actor are named.
    """
    about = metadata_of(message, KIND)
    header: dict[str, Any] = {}
    for name, kind in _HEADER.items():
        value = about.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or str(value).startswith("-"):
            raise DataError(
                "completions lack their policy or actor", given=f"{name} = {value!r}"[:200],
                expected=f"{name} as {kind.__name__}",
            )  # fmt: skip
        header[name] = value
    who = f"policy {header['policy']}, actor {header['actor']}, batch {header['sequence']}"
    try:
        episodes = _build(message, header)
    except (KeyError, RuntimeError, IndexError, TypeError, ValueError) as error:
        raise _wrong(who, f"{type(error).__name__}: {error}") from error
    if spec is not None:
        longest, vocabulary = spec.observation[0], spec.actions.sizes[0]
        if episodes.tokens.shape[1] > longest or int(episodes.tokens.max()) >= vocabulary:
            raise _wrong(
                who, f"{episodes.tokens.shape[1]} tokens up to {int(episodes.tokens.max())}",
                f"at most {longest} tokens below {vocabulary}",
            )  # fmt: skip
    return episodes.check()


def _build(message: Mapping[str, Tensor], header: Mapping[str, Any]) -> Episodes:
    prompts, lengths = message["prompts"].long(), message["lengths"].long()
    tokens = message["tokens"]
    if prompts.ndim != 1 or prompts.shape != lengths.shape or not len(prompts):
        raise ValueError(f"{tuple(prompts.shape)} prompts, {tuple(lengths.shape)} completions")
    if int(prompts.min()) < 1 or int(lengths.min()) < 1 or tokens.is_floating_point():
        raise ValueError("a text without a prompt, or without a completion")
    room = len(prompts) * int((prompts + lengths).max())
    if not room <= MAX_TOKENS or int((prompts + lengths).sum()) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens for texts of {room} together")
    whole, mask = _whole(prompts, lengths), _mask(lengths)
    return Episodes(
        tokens=_filled(whole, tokens.long()), prompts=prompts, lengths=lengths,
        log_probabilities=_filled(mask, message["log_probabilities"].float()),
        rewards=_filled(mask, message["rewards"].float()), scores=message["scores"].float(),
        **header,
    )  # fmt: skip


def _whole(prompts: Tensor, lengths: Tensor) -> Tensor:
    """Return the mask of prompts and completions, [B, L] bool."""
    return _mask(prompts + lengths)


def _mask(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _filled(mask: Tensor, values: Tensor) -> Tensor:
    if values.ndim != 1 or len(values) != int(mask.sum()):
        raise ValueError(f"{tuple(values.shape)} values for {int(mask.sum())} places")
    found = values.new_zeros(mask.shape)
    found[mask] = values
    return found


def _narrow(ids: Tensor) -> Tensor:
    """Return ids in the smallest integer type that fits."""
    largest = int(ids.max())
    for dtype in (torch.uint8, torch.int16):
        if largest <= torch.iinfo(dtype).max:
            return ids.to(dtype)
    return ids.to(torch.int32)


def _wrong(who: str, given: str, expected: str = "a message of the same version") -> DataError:
    return DataError(
        "completions do not fit", given=f"{who}: {given}"[:400], expected=expected,
        remedy="they were dropped and counted; nothing else is affected",
    )  # fmt: skip
