"""`auto` and `ef21` in real rounds: the members' common choice, and means of differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.codec import make_codec
from atoll.codec.wrappers.auto import STEPS, auto_inside
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.periodic import Average
from atoll.strategies.codec_selection import codec_state, load_codec_state
from tests.contracts.strategy_suite import Run, sgd, start_run, train_together
from tests.patience import PATIENCE_S


class Stretched:
    """A clock on which an exchange takes as long as it pleases the test."""

    def __init__(self, seconds: float) -> None:
        self.now_s, self.seconds = 0.0, seconds

    def monotonic(self) -> float:
        self.now_s += self.seconds
        return self.now_s

    def time(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def wide_model() -> nn.Module:
    """Return a network of 40 000 numbers: 160 KB, enough to tell a link's speed by."""
    model = nn.Sequential(nn.Linear(5, 5000), nn.Tanh(), nn.Linear(5000, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    return model


def start(group: Group, *, seconds: float, model: nn.Module | None = None) -> Run:
    """Return a member for whose clock every exchange takes so many seconds."""
    run = start_run(
        Average(every=1), group, int(group.me[1:]), codec="feedback(auto)", model=model,
        optimizer=sgd, begin=False,
    )  # fmt: skip
    round_client = run.outer._round_client  # type: ignore[attr-defined]
    round_client._selection._clock = Stretched(seconds)
    run.outer.begin(run.task)
    return run


def in_use(run: Run) -> str:
    auto = auto_inside(run.outer._codec)  # type: ignore[attr-defined]
    assert auto is not None
    return auto.base.spec


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [((5e-5, 5e-5), "fp32"), ((1.0, 1.0), "int4:256"), ((1e-5, 4.0), "int4:256")],
)
def test_members_choose_the_codec_that_suits_the_slowest_link(
    seconds: tuple[float, float], expected: str
) -> None:
    def body(group: Group) -> tuple[list[str], Run]:
        run = start(group, seconds=seconds[int(group.me[1:])], model=wide_model())
        used = []
        for _ in range(3):
            used.append(in_use(run))
            run.train(1)
        return used, run

    results = MemoryGroups(2).together(body)
    assert [used for used, _ in results] == [["fp32", expected, expected]] * 2
    first, second = (run for _, run in results)
    assert torch.equal(first.vector(), second.vector())
    elements, ladder = first.vector().numel(), 4 * STEPS
    sent = [result.sent_bytes for result in first.results]
    assert sent == [4 * elements + ladder, *[make_codec(expected).nbytes(elements)] * 2]
    states = [run.outer.state_dict()["shared.codec.auto.choice"] for run in (first, second)]
    assert torch.equal(*states)


def test_small_vectors_stay_exact_whatever_the_delay() -> None:
    def body(group: Group) -> str:
        run = start(group, seconds=5.0)
        run.train(3)
        return in_use(run)

    assert MemoryGroups(2).together(body) == ["fp32", "fp32"]


def test_choice_is_taken_back_when_the_round_is_not_committed() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def body(group: Group) -> tuple[str, Run]:
        run = start(group, seconds=1.0, model=wide_model())
        if group.me == "w1":
            groups.kill("w1", at="commit")
        run.train(2)
        return in_use(run), run

    results = groups.run(body)
    survivors = [result for result in results if isinstance(result, tuple)]
    assert [used for used, _ in survivors] == ["int4:256"] * 2
    assert torch.equal(*(run.vector() for _, run in survivors))


def test_ef21_in_rounds_comes_close_to_rounds_without_a_codec() -> None:
    exact, fed, plain = (
        train_together(Average(every=1), members=3, steps=60, codec=codec, optimizer=sgd)[0]
        for codec in ("fp32", "ef21(topk:0.4)", "topk:0.4")
    )
    far = float((plain.vector() - exact.vector()).norm())
    assert float((fed.vector() - exact.vector()).norm()) < 0.7 * far


def test_ef21_survives_loading_and_a_latecomer() -> None:
    options = Average(every=1)

    def state(group: Group) -> dict[str, torch.Tensor]:
        run = start_run(options, group, int(group.me[1:]), codec="ef21(int8)")
        run.train(4)
        return run.outer.state_dict()

    states = MemoryGroups(2).together(state)
    name = "shared.codec.ef21.sum.delta"
    assert torch.equal(states[0][name], states[1][name])
    late = make_codec("ef21(int8)")
    load_codec_state(late, {k: v for k, v in states[0].items() if k.startswith("shared.")})
    assert torch.equal(codec_state(late)[name], states[0][name])
