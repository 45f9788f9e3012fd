"""Commands of the first rank reach every rank, whole and in order."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from atoll.errors import WireError
from atoll.island.command_broadcaster import CommandBroadcaster
from tests.island.pool import Ranks


def _commands(words: list[str]) -> list[Any]:
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    heard: list[Any] = []

    def note(*tensors: Tensor, **values: Any) -> int:
        heard.append(([t.clone() for t in tensors], values))
        return len(heard)

    broadcaster.on("note", note)
    if broadcaster.leads:
        for number, word in enumerate(words):
            tensors = [torch.arange(number * 1000.0), torch.tensor([number], dtype=torch.int64)]
            assert broadcaster.call("note", tensors, word=word, number=number) == number + 1
        broadcaster.end()
    else:
        broadcaster.serve()
    assert broadcaster.ended
    return heard


def _parted() -> list[bool]:
    """Return whether each tensor that the last exchange was made of is still held by somebody."""
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    made: list[weakref.ref[Tensor]] = []

    def zeros(count: int) -> Tensor:
        tensor = torch.ones(count) - 1
        made.append(weakref.ref(tensor))
        return tensor

    with patch("atoll.island.command_broadcaster.torch.zeros", zeros):
        broadcaster.part()
    return [one() is not None for one in made]


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_is_held_by_other_threads_once_ranks_have_parted(ranks: Ranks, count: int) -> None:
    assert ranks.run(count, _parted) == [[False] * (count + 1)] * count


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_rank_hears_every_command(ranks: Ranks, count: int) -> None:
    words = ["", "a", "b" * 4060, "c" * 4096, "d" * 50_000]
    found = ranks.run(count, _commands, words)
    for heard in found:
        assert [values["word"] for _, values in heard] == words
        for number, (tensors, _) in enumerate(heard):
            assert torch.equal(tensors[0], torch.arange(number * 1000.0))
            assert tensors[1].item() == number


KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def _broadcasts(lengths: list[int]) -> tuple[list[int], bool]:
    """Return how many broadcasts each command took, and whether tensors of all kinds came whole."""
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    heard: list[tuple[Tensor, ...]] = []
    counts: list[int] = []
    broadcast = broadcaster._broadcast

    def counted(tensor: Tensor) -> None:
        counts[-1] += 1
        broadcast(tensor)

    broadcaster._broadcast = counted  # type: ignore[method-assign]

    def take(*tensors: Tensor) -> None:
        heard.append(tensors)
        counts.append(0)

    broadcaster.on("take", take)
    counts.append(0)
    odd = [torch.arange(-3, 4).to(kind).view(1, 7) for kind in KINDS]
    odd += [torch.empty(0, 3), torch.tensor(2.5)]
    if broadcaster.leads:
        for length in lengths:
            broadcaster.call("take", [*odd, torch.full((length,), 7, dtype=torch.uint8)])
        broadcaster.end()
    else:
        broadcaster.serve()
    whole = all(
        all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, odd, strict=False))
        and found[-1].tolist() == [7] * length
        for found, length in zip(heard, lengths, strict=True)
    )
    return counts[: len(lengths)], whole


def test_commands_of_one_length_need_one_broadcast_each(ranks: Ranks) -> None:
    lengths = [10, 9000, 9000, 9000, 10, 300_000, 9000, 2_000_000]
    for counts, whole in ranks.run(2, _broadcasts, lengths):
        assert whole
        assert counts == [1, 2, 1, 1, 1, 2, 1, 9], "the longest one: each tensor by itself"


def _ahead(commands: int) -> list[int]:
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    noted: list[int] = []

    def note(*, number: int) -> None:
        if not broadcaster.leads:  # waits for what rank 0 sends after all commands
            dist.recv(torch.empty(1), src=0)
        noted.append(number)

    broadcaster.on("note", note, ahead=True)
    if not broadcaster.leads:
        broadcaster.serve()
        return noted
    for number in range(commands):
        broadcaster.call("note", number=number)
    for peer in range(1, dist.get_world_size()):
        for _ in range(commands):
            dist.send(torch.ones(1), dst=peer)
    broadcaster.end()
    return noted


def test_rank_0_does_not_wait_for_commands_sent_ahead(ranks: Ranks) -> None:
    assert ranks.run(2, _ahead, 3) == [[0, 1, 2]] * 2


def _after_the_end() -> str:
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    broadcaster.on("note", lambda: None)
    if not broadcaster.leads:
        broadcaster.serve()
        return ""
    broadcaster.end()
    broadcaster.end()
    with pytest.raises(WireError) as caught:
        broadcaster.call("note")
    return str(caught.value)


def test_nobody_is_commanded_after_the_end(ranks: Ranks) -> None:
    told, _ = ranks.run(2, _after_the_end)
    assert "has ended already" in told


def _failing() -> None:
    if dist.get_rank() == 1:
        raise WireError("on purpose", given="rank 1")


def test_a_failure_of_one_rank_is_raised(ranks: Ranks) -> None:
    with pytest.raises(WireError, match="on purpose"):
        ranks.run(2, _failing)
    assert len(ranks.run(2, _commands, ["again"])) == 2


def _broken() -> tuple[str, bool]:
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())

    def fail() -> None:
        raise ValueError("on this rank")

    broadcaster.on("fail", fail)
    with pytest.raises(ValueError, match="on this rank"):
        broadcaster.call("fail") if broadcaster.leads else broadcaster.serve()
    if not broadcaster.leads:
        return "", broadcaster.ended
    with pytest.raises(WireError) as caught:
        broadcaster.call("fail")
    broadcaster.end()  # nobody listens, and nobody is waited for
    return str(caught.value), broadcaster.ended


def test_a_command_that_failed_is_the_last_one(ranks: Ranks) -> None:
    told, other = ranks.run(2, _broken)
    assert "no longer in step" in told[0]
    assert (told[1], other[1]) == (True, False)
