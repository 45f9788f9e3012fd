"""The same start: before members can talk about differences they must stand on the same state."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.errors import GroupError
from atoll.group.policy import exactly
from atoll.group.run_round import CommittedMean
from atoll.strategies.rounds.round_client import RoundClient
from atoll.strategies.vectors.flat import Flat, digest
from atoll.task import Task

log = logging.getLogger(__name__)

DIGEST_ELEMENTS = 32
"""Numbers that a comparison of digests sends: 16 bytes, and their squares."""


def broadcast_start(
    task: Task, flat: Flat, round_client: RoundClient, *, base: str
) -> tuple[Tensor, list[CommittedMean]]:
    """Make every member's tensors those of the first member; return them as one vector.

    First the members average the bytes of their digests, and the squares of these: the variance
    is zero exactly when all are equal. That costs 128 bytes and is all that happens when everybody
    began from the same seed. Otherwise a second round follows in which only the first member's
    values have weight, uncompressed, so that all others take them over exactly.

    Under a robust policy nobody's parameters are taken over: who differs from most is refused.

    Args:
        task: Its round is advanced.
        flat: What has to be equal.
        round_client: Runs the rounds.
        base: What all stand on already: their last common digest, or a fixed word.

    Raises:
        GroupError: this member differs, and the group's policy trusts nobody.
    """
    codec = make_codec("fp32")
    vector = flat.read()
    rounds: list[CommittedMean] = []
    while True:
        mark = torch.tensor(list(bytes.fromhex(digest(vector))), dtype=torch.float32)
        with exactly(round_client.group):
            compared = round_client.run(
                task,
                round_client.mean_of(
                    task, [mark, mark.square()], codec=codec, weight=1.0, key="start"
                ),
                base=base,
            )
        rounds.append(compared)
        task.round += 1
        mean, squares = compared.reduced.tensors
        if round_client.group.policy.robust:
            _check_with_most(mark, mean, task.member)
            return vector, rounds
        if len(compared.reduced.contributors) == 1 or torch.equal(mean.square(), squares):
            return vector, rounds
        leader = compared.reduced.contributors[0]
        log.info("members start from different parameters: all take those of %s", leader)
        try:
            weight = float(round_client.group.me == leader)
            with exactly(round_client.group):
                values = round_client.mean_of(
                    task, [vector], codec=codec, weight=weight, key="start"
                )
                copied = round_client.run(task, values, base=base)
        except GroupError as error:
            if "weight" not in str(error):
                raise
            log.warning("%s was lost while it gave its parameters; asking again", leader)
            continue
        rounds.append(copied)
        task.round += 1
        vector = copied.reduced.tensors[0]
        flat.write(vector)
        return vector, rounds


def _check_with_most(mark: Tensor, most: Tensor, member: str) -> None:
    """Refuse to train from another start than most members.

    Args:
        mark: The own digest, as numbers.
        most: The median of all.
        member: For the message.
    """
    if not torch.equal(mark, most):
        raise GroupError(
            "this member starts from other parameters than most",
            given=f"{member}, under a policy that takes over nobody's parameters",
            expected="the same start on every member",
            remedy="build the model from the same seed, or load the same weights",
        )
