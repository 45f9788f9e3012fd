from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError, LeftBehind, LossNotFinite
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.methods.every_step import Cocktail
from atoll.strategies.base import HIDDEN
from atoll.strategies.outer.cocktail import CocktailOuter
from atoll.strategies.vectors.masks import Mask
from tests.contracts.strategy_suite import (
    Reference,
    Run,
    StrategySuite,
    adamw,
    small_model,
    squared_error,
    start_run,
    train_together,
)
from tests.patience import PATIENCE_S, PROMPT_S

COARSE = "topk:0.5|int8"


class TestCocktail(StrategySuite):
    name = "cocktail"
    options = Cocktail(probability=0.5)
    codec = COARSE
    coarse = COARSE
    wires = ("fp32", "int8", COARSE)
    identical = False

    def reference(self, members: int, steps: int) -> Tensor:
        """Half of the parameters are averaged after every step, which the next step's end sees."""
        those, mask = Reference.make(members, adamw), Mask(26, 0.5, "rolled")
        common = those.vectors()[0]
        for step in range(steps):
            for member in range(members):
                compute_gradients(those, member)
            if step:
                common = exchange(those, common, mask.at(step - 1))
            for optimizer in those.optimizers:
                optimizer.step()
        exchange(those, common, mask.at(steps - 1))
        return sum(those.vectors(), torch.zeros(1)) / members


def compute_gradients(those: Reference, member: int) -> None:
    model = those.models[member]
    those.optimizers[member].zero_grad()
    squared_error(model, next(those.streams[member]))[0].backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def exchange(those: Reference, common: Tensor, positions: Tensor) -> Tensor:
    """Replace every member's difference to the common copy by the mean of all; return the copy."""
    vectors, common = those.vectors(), common.clone()
    differences = [vector[positions] - common[positions] for vector in vectors]
    mean = sum(differences, torch.zeros(1)) / len(vectors)
    for vector, difference, model in zip(vectors, differences, those.models, strict=True):
        vector[positions] += mean - difference
        nn.utils.vector_to_parameters(vector.float(), model.parameters())
    common[positions] += mean
    return common


def scattered(model: nn.Module, slot: int) -> nn.Module:
    """Put multiples of 1/1024 into a model and return it: their sums and halves are exact."""
    generator = torch.Generator().manual_seed(slot)
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = torch.randint(-2048, 2048, parameter.shape, generator=generator)
            parameter.copy_(numbers / 1024.0)
    return model


def exchange_once(run: Run) -> None:
    """Hold one round between no steps at all."""
    run.task.advance()
    run.outer.sync(run.task)
    run.outer.gradients(run.task)


def exchanged(
    options: Cocktail, codec: str, *, members: int, rounds: int
) -> list[list[dict[str, Tensor]]]:
    """Return what every member has before the first round and after each."""

    def body(group: Group) -> list[dict[str, Tensor]]:
        start = scattered(small_model(), 99)
        run = start_run(options, group, 0, codec=codec, model=start)
        scattered(run.task.model, int(group.me[1:]))
        found = [snapshot(run)]
        for _ in range(rounds):
            exchange_once(run)
            found.append(snapshot(run))
        return found

    return MemoryGroups(members).together(body)


def snapshot(run: Run) -> dict[str, Tensor]:
    state = run.outer.state_dict()
    return {
        "x": run.vector().double(),
        "owed": state["own.owed"].double(),
        "common": state["shared.common"].clone(),
    }


def kept(moments: tuple[dict[str, Tensor], ...]) -> Tensor:
    """Return what an exchange must not change: the mean of all models and all that is owed."""
    models = sum((m["x"] for m in moments), torch.zeros(1)) / len(moments)
    return models + sum((m["owed"] for m in moments), torch.zeros(1))


@pytest.mark.parametrize(
    ("codec", "tolerance"), [("fp32", 0.0), ("topk:0.25", 0.0), (COARSE, 1e-6), ("sign", 1e-6)]
)
@pytest.mark.parametrize("members", [2, 4])
def test_exchange_keeps_mean_plus_residual(codec: str, tolerance: float, members: int) -> None:
    """Numbers are multiples of 1/1024, so without a quantiser not even the last bit may differ."""
    runs = exchanged(Cocktail(probability=0.4), codec, members=members, rounds=4)
    before, *after = (kept(moments) for moments in zip(*runs, strict=True))
    assert codec == "fp32" or any(run[-1]["owed"].any() for run in runs)
    for moment in after:
        assert (moment - before).abs().max() <= tolerance


@pytest.mark.parametrize("codec", ["fp32", COARSE])
def test_the_common_copy_is_the_same_on_all_members_bit_for_bit(codec: str) -> None:
    for moments in zip(
        *exchanged(Cocktail(probability=0.4), codec, members=3, rounds=4), strict=True
    ):
        assert all(torch.equal(m["common"], moments[0]["common"]) for m in moments)


def test_everything_uncompressed_is_averaging_of_parameters() -> None:
    runs = exchanged(Cocktail(probability=1.0), "fp32", members=3, rounds=1)
    mean = sum((run[0]["x"] for run in runs), torch.zeros(1)) / 3
    for run in runs:
        assert (run[1]["x"] - mean).abs().max() < 1e-6
        assert (run[1]["common"].double() - mean).abs().max() < 1e-6


def test_a_tenth_at_a_time_visits_everything_in_ten_rounds() -> None:
    runs = exchanged(Cocktail(probability=0.1), "fp32", members=2, rounds=10)
    mean = (runs[0][0]["x"] + runs[1][0]["x"]) / 2
    assert not torch.equal(runs[0][9]["x"], mean)
    assert torch.equal(runs[0][10]["x"], mean)
    assert torch.equal(runs[1][10]["x"], mean)


def test_unsent_difference_is_sent_later() -> None:
    """With one number of a part at a time members still come together: nothing is forgotten."""
    runs = exchanged(Cocktail(probability=1.0), "topk:0.1", members=2, rounds=60)
    spread = [(first["x"] - second["x"]).abs().max() for first, second in zip(*runs, strict=True)]
    assert spread[0] > 1.0
    assert spread[60] < 1e-6


def test_a_round_goes_on_while_the_next_batch_is_computed() -> None:
    """Both members compute until both rounds are seen to be under way."""
    meet = threading.Barrier(2)

    def body(group: Group) -> dict[str, float]:
        run = start_run(Cocktail(probability=1.0), group, int(group.me[1:]))
        run.train(1)
        outer = run.outer
        assert isinstance(outer, CocktailOuter)
        passing = outer._passing
        assert passing is not None
        assert passing.work is not None
        passing.work.wait(PATIENCE_S)  # it ends although its result was not asked for
        meet.wait(PATIENCE_S)
        run.train(1)
        return dict(run.results[-1].seconds)

    for seconds in MemoryGroups(2).together(body):
        assert seconds[HIDDEN] > 0
        assert seconds["reduce"] < PROMPT_S


def test_parameters_do_not_move_while_a_batch_is_computed() -> None:
    def body(group: Group) -> None:
        run = start_run(Cocktail(probability=1.0), group, int(group.me[1:]))
        run.train(3)
        before = run.vector()
        outer: Any = run.outer
        outer._passing.work.wait(PATIENCE_S)
        assert torch.equal(run.vector(), before)

    MemoryGroups(2).together(body)


def test_who_is_left_alone_gets_home_what_is_owed() -> None:
    groups = MemoryGroups(2)

    def body(group: Group) -> tuple[Tensor, Tensor] | None:
        start, options = scattered(small_model(), 99), Cocktail(probability=1.0)
        run = start_run(options, group, 0, codec="topk:0.25", model=start)
        scattered(run.task.model, int(group.me[1:]))
        for _ in range(2):
            exchange_once(run)
        before = snapshot(run)
        assert before["owed"].any()
        if group.me == "w1":
            group.leave()
            return None
        exchange_once(run)
        after = snapshot(run)
        assert not after["owed"].any()
        return before["x"] + before["owed"], after["x"]

    expected, found = next(pair for pair in groups.together(body) if pair is not None)
    assert torch.equal(found, expected)


def test_lagging_member_holds_the_round_in_flight() -> None:
    """It takes model and common copy from a donor; from the next round on both are in it."""
    groups = MemoryGroups(2, hold_s=20.0)
    at = {name: threading.Event() for name in ("gone", "ahead", "recovering", "ready")}
    donor: dict[str, Run] = {}

    def stays(group: Group) -> Run:
        run = donor["w0"] = start_run(Cocktail(probability=0.5), group, 0, codec=COARSE)
        run.train(2)
        assert at["gone"].wait(PATIENCE_S)
        run.train(2)
        under_way(run)
        at["ahead"].set()
        assert at["recovering"].wait(PATIENCE_S)
        run.train(1)
        at["ready"].set()
        run.train(2)
        run.note(run.outer.finish(run.task))
        return run

    def comes_back(group: Group) -> Run:
        run = start_run(Cocktail(probability=0.5), group, 1, codec=COARSE)
        run.train(2)
        under_way(run)
        groups.lose("w1")
        at["gone"].set()
        assert at["ahead"].wait(PATIENCE_S)
        run.train(1)
        with pytest.raises(LeftBehind):
            run.train(1)
        group.recover()
        at["recovering"].set()
        assert at["ready"].wait(PATIENCE_S)
        theirs = donor["w0"]
        assert theirs.task.round == group.committed_round
        run.task.model.load_state_dict(theirs.task.model.state_dict())
        run.task.step, run.task.round = theirs.task.step, theirs.task.round
        run.outer.load_state_dict({k: v.clone() for k, v in theirs.outer.shared_state().items()})
        run.outer.rejoin(run.task)
        group.standing(run.task.round, base=run.outer.committed(run.task).base)
        run.train(2)
        run.note(run.outer.finish(run.task))
        return run

    def under_way(run: Run) -> None:
        outer: Any = run.outer
        outer._passing.work.wait(PATIENCE_S)

    first, second = groups.together(lambda g: (stays if g.me == "w0" else comes_back)(g))
    assert [r.contributors for r in first.results[-3:]] == [("w0", "w1")] * 3
    assert ("w0",) in [r.contributors for r in first.results]
    assert first.results[-1].digest == second.results[-1].digest
    assert torch.equal(first.vector(), second.vector())
    common = [run.outer.shared_state()["shared.common"] for run in (first, second)]
    assert torch.equal(*common)


def test_buffers_are_averaged_and_keep_what_came_in_meanwhile() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.Parameter(torch.zeros(2))
            self.register_buffer("seen", torch.zeros(1))
            self.seen: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return self.at.expand(len(x), 2)

    def body(group: Group) -> float:
        run = start_run(Cocktail(), group, 0, model=Counted())
        run.train(1)
        step = float(int(group.me[1:]) * 2)  # 0 and 2: one in the mean
        for _ in range(3):
            with torch.no_grad():
                run.task.buffers()[0].add_(step)
            run.train(1)
        run.outer.finish(run.task)
        return float(run.task.buffers()[0])

    assert MemoryGroups(2).together(body) == [3.0, 3.0]


def test_a_state_saved_while_a_round_is_under_way_has_its_result() -> None:
    def body(group: Group) -> None:
        run = start_run(Cocktail(probability=0.5), group, int(group.me[1:]), codec=COARSE)
        run.train(3)
        state = {k: v.clone() for k, v in run.outer.state_dict().items()}
        assert not any("pending" in key for key in run.outer.shared_state())
        loaded: Any = Cocktail(probability=0.5).build()
        loaded.setup(run.task, group=group, codec=run.outer._codec)  # type: ignore[attr-defined]
        loaded.load_state_dict(state)
        again = loaded.state_dict()
        assert again.keys() == state.keys()
        assert all(torch.equal(again[key], state[key]) for key in state)
        assert any(key.startswith("shared.pending.") for key in state)

    MemoryGroups(2).together(body)


def test_parameters_that_are_not_finite_are_never_shared() -> None:
    run = start_run(Cocktail(probability=1.0), SingleGroup(), 0)
    with torch.no_grad():
        run.task.parameters()[0].fill_(float("nan"))
    with pytest.raises(LossNotFinite, match="w0"):
        run.outer.sync(run.task)


def test_the_bytes_are_those_of_the_recommended_mixture() -> None:
    """A tenth, a fifth of that, 4 bits: about 0.17 bits per parameter each way, two members."""
    run = start_run(
        Cocktail(), MemoryGroups(1)[0], 0, codec="topk:0.2|int4", model=nn.Linear(1_000, 1_000)
    )
    one = run.outer.traffic(1_001_000, 2, steps=1)
    two = run.outer.traffic(1_001_000, 2, steps=2)
    per_round = two.relay_sent_bytes - one.relay_sent_bytes
    assert 0.15 < 8 * per_round / 1_001_000 < 0.18


def test_separated_members_end_with_one_model() -> None:
    runs = train_together(Cocktail(probability=0.2), members=3, steps=5, codec="topk:0.2|int4")
    assert not torch.equal(runs[0].rounds[-2], runs[1].rounds[-2])
    assert torch.equal(runs[0].vector(), runs[1].vector())
    state = runs[0].outer.state_dict()
    assert torch.equal(state["shared.common"], runs[0].vector())
    assert not state["own.owed"].any()


def test_codecs_with_a_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="CocktailSGD cannot use codec"):
        start_run(Cocktail(), MemoryGroups(1)[0], 0, codec="feedback(topk:0.2|int4)")


@pytest.mark.parametrize(
    "options", [Cocktail(probability=0.0), Cocktail(mask="some"), Cocktail(weight="x")]
)
def test_options_out_of_range_are_refused(options: Cocktail) -> None:
    with pytest.raises(ConfigError):
        options.build()
