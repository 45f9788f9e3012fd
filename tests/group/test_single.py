from __future__ import annotations

import threading
import time

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.errors import DeadlineExceeded, LeftBehind, PeerLost
from atoll.group.base import Group, Work, flatten, unflatten
from atoll.group.period import PeriodReport
from atoll.group.run_round import mean_exchange, run_round
from atoll.group.single import SingleGroup
from tests.patience import PATIENCE_S


def test_values_come_back_exactly_whatever_the_codec() -> None:
    group: Group = SingleGroup()
    x = torch.randn(3, 7)
    agreed = run_round(
        group, mean_exchange(group, [x], codec=make_codec("int8"), weight=5.0), PeriodReport(0, "b")
    )
    (found,) = agreed.reduced.tensors
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr()
    assert agreed.reduced.contributors == ("w0",)
    assert agreed.reduced.weight == 5.0
    assert agreed.sent_bytes == agreed.received_bytes == 0
    assert group.committed_round == 1


def test_rounds_count_up_and_others_are_refused() -> None:
    group = SingleGroup(committed_round=4)
    with pytest.raises(LeftBehind):
        group.join(PeriodReport(3, "b"))
    group.join(PeriodReport(4, "b"))
    assert not group.commit(None).committed
    assert group.committed_round == 4


def test_wait_is_bounded_and_says_so() -> None:
    gate = threading.Event()
    work = Work.start(lambda: gate.wait(PATIENCE_S), name="slow")
    with pytest.raises(DeadlineExceeded):
        work.wait(0.01)
    assert not work.done()
    gate.set()
    assert work.wait(PATIENCE_S)
    bounded: Work[int] = Work(deadline=time.monotonic() + 0.01)
    with pytest.raises(DeadlineExceeded):
        bounded.wait()


def test_first_end_of_work_counts() -> None:
    work: Work[int] = Work()
    work.fail(PeerLost("gone"))
    work.finish(3)
    with pytest.raises(PeerLost):
        work.wait(PATIENCE_S)
    own = Work.start(lambda: (_ for _ in ()).throw(TimeoutError("mine")), name="raises")
    with pytest.raises(TimeoutError, match="mine"):
        own.wait(PATIENCE_S)


def test_flatten_and_unflatten_are_inverse_and_reuse_memory() -> None:
    xs = [torch.randn(2, 3), torch.zeros(0), torch.tensor(4.0), torch.arange(5).to(torch.int16)]
    vector = flatten(xs)
    for x, back in zip(xs, unflatten(vector, xs), strict=True):
        assert back.shape == x.shape
        assert torch.equal(back, x.float())
    assert flatten(xs, out=vector).data_ptr() == vector.data_ptr()
    assert flatten(xs[:1], out=vector).data_ptr() != vector.data_ptr()
    assert flatten([]).numel() == 0
    assert unflatten(flatten([]), []) == []
