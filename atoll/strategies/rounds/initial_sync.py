"""A common start: members MUST have equal states before they exchange differences."""

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
"""Elements sent to compare digests: 16 bytes, and their squares."""


def broadcast_start(
    task: Task, flat: Flat, round_client: RoundClient, *, base: str
) -> tuple[Tensor, list[CommittedMean]]:
    """Copy the first member's tensors to all members; return them as one vector, and the rounds.

    First the members average the bytes of their digests, and the squares of these: the variance is
    zero exactly if all are equal. That costs 128 bytes, and suffices if all members used the same
    seed. Otherwise a second round follows in which only the first member's values have weight, in
    fp32, so that the copies are exact. Under a robust policy no member's parameters are copied:
    those that differ from the majority are rejected.

    Args:
        task: Its round is advanced.
        flat: The tensors to be made equal.
        round_client: Runs the rounds.
        base: Last common digest, or a fixed word.

    Raises:
        GroupError: this member differs, and the policy is robust.
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
    """Raise GroupError unless the own digest `mark` equals the median `most`."""
    if not torch.equal(mark, most):
        raise GroupError(
            "this member starts from other parameters than most",
            given=f"{member}, under a policy that does not adopt parameters",
            expected="the same start on every member",
            remedy="build the model from the same seed, or load the same weights",
        )
