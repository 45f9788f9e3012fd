"""What other members send to a stage cannot end the member that serves it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.group.peers.channel import LocalNetwork
from atoll.strategies.inner.swarm.activations import ActivationCodec
from atoll.strategies.inner.swarm.runner import MicrobatchKey, StageRunner
from atoll.strategies.inner.swarm.stage import StageCut
from atoll.train.swarm.work import ReportTo, StageWork, _Task
from atoll.wire.swarm import Broken, Holder, Work
from tests.strategies.swarm.kit import batch_of, runners

PATH = [Holder(f"w{stage}", 1) for stage in range(3)]


def served(runner: StageRunner) -> tuple[StageWork, list[ReportTo]]:
    """Return the work of a stage, and the events that it causes."""
    events: list[ReportTo] = []
    network, stage = LocalNetwork(), runner.stage.number
    for holder in PATH:
        network.channel(holder.member)
    work = StageWork(
        runner, PATH[stage], network.channel(PATH[stage].member), ActivationCodec("fp32"),
        lambda step, index: batch_of("gpt", step, index), event=events.append,
    )  # fmt: skip
    return work, events


def work_of(index: int, *, stages: list[int]) -> Work:
    return Work(0, index, index + 1, 1, PATH, stages)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("stages", [[0, 1, 2], []], ids=["trains", "evaluates"])
def test_inputs_of_a_wrong_shape_are_refused(stage: int, stages: list[int]) -> None:
    runner = runners("gpt", cut=StageCut(stages=3))[stage]
    work, events = served(runner)
    for index, wrong in enumerate((torch.ones(4, 8, 3), torch.ones(4, 8, 16).long())):
        work._enqueue(_Task(work_of(index, stages=stages), False, (wrong,)))
        assert work.compute()
        report = events[index].report
        assert isinstance(report, Broken)
        assert "cannot compute the inputs" in report.reason
    assert not runner.held


def failing(inputs: Tensor) -> Tensor:
    raise RuntimeError("the allocator cannot allocate memory")


def test_an_error_of_the_own_module_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    first, own = runners("gpt", cut=StageCut(stages=3))[:2]
    (values,) = first.forward(MicrobatchKey(0, 0), (batch_of("gpt", 0, 0)[0],))
    work, _ = served(own)
    work._enqueue(_Task(work_of(0, stages=[0, 1, 2]), False, (values,)))
    assert work.compute()
    monkeypatch.setattr(own.stage.module, "forward", failing)
    work._enqueue(_Task(work_of(1, stages=[0, 1, 2]), False, (values,)))
    with pytest.raises(RuntimeError, match="allocate memory"):
        work.compute()


def test_a_stage_that_never_computes_anything_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runners("gpt", cut=StageCut(stages=3))[1]
    monkeypatch.setattr(runner.stage.module, "forward", failing)
    work, _ = served(runner)
    for index in range(16):
        work._enqueue(_Task(work_of(index, stages=[0, 1, 2]), False, (torch.ones(4, 8, 16),)))
    assert all(work.compute() for _ in range(15))
    with pytest.raises(RuntimeError, match="allocate memory"):
        work.compute()
