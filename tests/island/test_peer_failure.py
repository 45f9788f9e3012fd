"""The loss of another rank is told from errors of one's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from torch import Tensor

from atoll.errors import ConfigError, LossNotFinite, RankLost
from atoll.island.peer_failure import is_peer_failure, rank_lost
from tests.island.pool import Ranks


def _second_is_gone() -> str:
    """Meet a rank that has left the process group; return what the first one is told."""
    if torch.distributed.get_rank() == 1:
        return ""
    with pytest.raises(RuntimeError) as caught:
        torch.distributed.all_reduce(torch.zeros(4))
    assert is_peer_failure(caught.value), caught.value
    return str(rank_lost(caught.value, rank=0, ranks=2))


def test_rank_whose_peer_is_gone_has_lost_touch(ranks: Ranks) -> None:
    told, _ = ranks.run(2, _second_is_gone)
    assert "rank 0 of 2: RuntimeError" in told


def _with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


GLOO = RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GLOO, True),
        (RankLost("gone"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), True),
        (_with_cause(ValueError("on the way out"), GLOO), True),
        (None, False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("of something else: Connection reset by peer"), False),
        (ConfigError("wrong"), False),
        (_with_cause(LossNotFinite("the loss"), ValueError("x")), False),
    ],
)
def test_only_what_comes_from_another_rank_is_its_loss(error: Exception | None, lost: bool) -> None:
    assert is_peer_failure(error) is lost


def test_tensors_of_the_wrong_shape_are_no_loss() -> None:
    left: Tensor = torch.zeros(2, 3)
    with pytest.raises(RuntimeError) as caught:
        _ = left @ left
    assert not is_peer_failure(caught.value)
