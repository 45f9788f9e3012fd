"""Recognizes errors caused by the loss of another rank, which makes collectives of all fail."""

from __future__ import annotations

from atoll.errors import RankLost

KINDS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
"""Errors of torch.distributed by name, so that torch need not be imported."""

SIGNS = (
    "/gloo/transport/",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out waiting",
)
"""Messages of Gloo's plain RuntimeErrors when another rank is lost."""

MAX_DEPTH = 16


def is_peer_failure(error: BaseException | None) -> bool:
    """Return whether an exception or one of its causes means that another rank is lost."""
    for _ in range(MAX_DEPTH):
        if error is None:
            return False
        if isinstance(error, RankLost) or type(error).__name__ in KINDS:
            return True
        if isinstance(error, RuntimeError) and any(s in str(error).lower() for s in SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


def rank_lost(error: BaseException, *, rank: int, ranks: int) -> RankLost:
    """Return the error of a healthy rank that lost contact with the others."""
    first = (str(error).splitlines() or [""])[0]
    return RankLost(
        "the ranks of an island have lost contact with each other",
        given=f"rank {rank} of {ranks}: {type(error).__name__}: {first}"[:400],
        expected="that all answer within timeout_s in [island]",
        remedy="see the last lines of the other ranks: atoll logs",
    )
