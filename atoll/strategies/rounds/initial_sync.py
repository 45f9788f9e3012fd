"""A common start: members MUST have equal states before they exchange differences."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.errors import ConfigError, GroupError
from atoll.group.aggregation import exactly
from atoll.group.base import Group, Reduced
from atoll.group.run_round import CommittedMean
from atoll.strategies.rounds.round_client import RoundClient
from atoll.strategies.vectors.flat import Flat, real_view
from atoll.strategies.vectors.whole_state import (
    layout,
    tensor_digest,
    together,
    values,
    whole_state,
    words,
)
from atoll.task import Task
from atoll.wire.messages import RoundPlan

log = logging.getLogger(__name__)

DIGEST_ELEMENTS = 32
"""Numbers sent to compare digests: 8 bytes in halves, and the squares of these."""


def broadcast_start(
    task: Task, flat: Flat, round_client: RoundClient, *, base: str
) -> tuple[Tensor, list[CommittedMean]]:
    """Copy the first member's whole state to all members; return `flat` as a vector, and rounds.

    The whole state is every parameter, trained or frozen, and every saved buffer. First the members
    average the half bytes of a digest of it, and their squares: the variance is zero exactly if all
    are equal. That costs 128 bytes, and suffices if all members used the same seed. Otherwise a
    second round compares the digests of single tensors, and copies those that differ bit for bit.
    Under a robust rule nothing is copied: members that differ from the majority are rejected.

    Args:
        task: Its round is advanced.
        flat: The tensors that are exchanged in later rounds.
        round_client: Runs the rounds.
        base: Last common digest, or a fixed word.

    Raises:
        ConfigError: the members have different models.
        GroupError: this member differs, and the aggregation is robust.
    """
    state = whole_state(task)
    tensors, rounds = list(state.values()), list[CommittedMean]()
    digests = [tensor_digest(tensor) for tensor in tensors]
    mark = half_bytes(layout(tensors)[:4] + together(digests)[:4])
    while True:
        with exactly(round_client.group):
            both = round_client.mean_of(
                task, [mark, mark.square()], codec=make_codec("fp32"), weight=1.0, key="start"
            )
            compared = round_client.run(task, both, base=base)
        rounds.append(compared)
        task.round += 1
        mean, squares = compared.reduced.tensors
        if round_client.group.aggregation.robust:
            _check_with_most(mark, mean, task.member)
            return flat.read(), rounds
        differs = mean.square() != squares
        if len(compared.reduced.contributors) == 1 or not differs.any():
            return flat.read(), rounds
        if differs[:8].any():
            raise ConfigError(
                "the members do not start with the same model",
                given=f"{task.member}: {len(tensors)} tensors of "
                f"{sum(tensor.numel() for tensor in tensors)} values",
                expected="tensors of the same shapes, in the same order, on every member",
            )
        leader = compared.reduced.contributors[0]
        copying = _Copying(task, round_client.group, tensors, digests, leader=leader)
        try:
            with exactly(round_client.group):
                copied = round_client.run(task, copying.exchange, base=base)
        except LeaderLost:
            log.warning("%s was lost while it gave its parameters; asking again", leader)
            continue
        rounds.append(copied)
        task.round += 1
        names = [name for name, differs in zip(state, copying.differs, strict=True) if differs]
        log.info("members started with different values; all take those of %s: %s", leader, names)
        return copying.apply(copied, flat), rounds


class LeaderLost(GroupError):
    """The member that gives its values was lost, so that only weights of 0 were left."""


class _Copying:
    """The exchange that finds the tensors which differ, and copies those of one member."""

    def __init__(
        self,
        task: Task,
        group: Group,
        tensors: Sequence[Tensor],
        digests: Sequence[bytes],
        *,
        leader: str,
    ) -> None:
        """`leader` gives its values."""
        self._task, self._group, self._tensors, self._leader = task, group, tensors, leader
        self._mark = half_bytes(b"".join(digest[:4] for digest in digests))
        self.differs: list[bool] = []

    def exchange(self, _: RoundPlan) -> Reduced:
        """Compare all tensors, then copy; may be called again after an aborted attempt."""
        found = self._mean([self._mark, self._mark.square()], weight=1.0)
        mean, squares = found.tensors
        self.differs = (mean.square() != squares).view(-1, 8).any(1).tolist()
        own = words(self._chosen()) if any(self.differs) else torch.zeros(1)
        try:
            copied = self._mean([own], weight=float(self._group.me == self._leader))
        except GroupError as error:
            if type(error) is not GroupError:  # e.g. PeerLost: the round is tried again
                raise
            raise LeaderLost(
                "the member that gives its values did not contribute", given=self._leader
            ) from error
        return replace(
            copied,
            digest=together([found.digest.encode(), copied.digest.encode()]).hex(),
            sent_bytes=found.sent_bytes + copied.sent_bytes,
            received_bytes=found.received_bytes + copied.received_bytes,
        )

    @torch.no_grad()
    def apply(self, copied: CommittedMean, flat: Flat) -> Tensor:
        """Load the copied tensors into the model; return `flat` as a vector."""
        chosen = self._chosen()
        found = values(copied.reduced.tensors[0], chosen) if chosen else []
        for tensor, value in zip(chosen, found, strict=True):
            real_view(tensor).copy_(value)
        self._task.push()
        vector = flat.read()
        # Where this member rounds to half precision, the vector has the values themselves.
        places = dict(zip(map(id, flat.tensors), flat.views(vector), strict=True))
        for tensor, value in zip(chosen, found, strict=True):
            if id(tensor) in places:
                places[id(tensor)].copy_(value)
        return vector

    def _chosen(self) -> list[Tensor]:
        return [t for t, differs in zip(self._tensors, self.differs, strict=True) if differs]

    def _mean(self, xs: Sequence[Tensor], *, weight: float) -> Reduced:
        work = self._group.reduce(xs, codec=make_codec("fp32"), weight=weight, key="start")
        with self._task.state_lock.resting():
            return work.wait()


def half_bytes(digest: bytes) -> Tensor:
    """Return a digest as numbers of 0 to 15, float32, (2 n,).

    Sums of their squares are exact for up to 74,000 members; of whole bytes for 258 only.
    """
    return torch.tensor([half for byte in digest for half in divmod(byte, 16)], dtype=torch.float32)


def _check_with_most(mark: Tensor, most: Tensor, member: str) -> None:
    """Raise GroupError unless the own digest `mark` equals the median `most`."""
    if not torch.equal(mark, most):
        raise GroupError(
            "this member starts from other parameters than most",
            given=f"{member}, under an aggregation that does not adopt parameters",
            expected="the same start on every member",
            remedy="build the model from the same seed, or load the same weights",
        )
