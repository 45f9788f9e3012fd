"""What a loop may rely on, whichever it is: alone, together, after a loss, resumed, divided anew.

Of every loop in the table: which samples were trained on, how many steps were taken at which rates,
and that every parameter and buffer is the same on all members, in all its bits.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll
from atoll.errors import ConfigError
from tests.loops.job import Job, Life, train_bare
from tests.loops.plain_loops import SAMPLES
from tests.loops.table import ROWS, Circumstance, Row

pytestmark = [
    # What the libraries themselves call that torch is about to take away, and their advice.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
]

DILOCO = atoll.DiLoCo(every=2, outer_lr=0.7, outer_momentum=0.5)
METHODS = {"local-sgd": atoll.Average(every=2), "diloco": DILOCO, "ddp": "ddp"}


def cases(
    circumstance: Circumstance, *methods: str, members: tuple[int, ...] = ()
) -> pytest.MarkDecorator:
    """Parametrise a test by loops, methods and numbers of members."""
    found = []
    for name, row in ROWS.items():
        if circumstance in row.without:
            continue
        for method, count in itertools.product(methods, members or (0,)):
            if method == "ddp" and not row.averages_gradients:
                continue
            given = (row, METHODS[method], *[count] * bool(members))
            label = f"{name}-{method}" + f"-{count}" * bool(members)
            found.append(pytest.param(*given, id=label))
    names = ("row", "method", "members") if members else ("row", "method")
    return pytest.mark.parametrize(names, found)


@pytest.fixture(autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    row = request.node.callspec.params.get("row")
    needs = row.needs if row is not None else ""
    if not needs:
        return
    pytest.importorskip(needs, reason="pip install 'atoll[dev]'")
    if needs == "transformers":
        from accelerate.state import AcceleratorState

        # One state per process, which every Trainer makes anew: members in threads would take it
        # away from each other.
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr(AcceleratorState, "_reset_state", lambda *_, **__: None)


def assert_one_model(lives: list[Life], row: Row, *, but: frozenset[str] = frozenset()) -> None:
    if not row.even:
        return
    first, *others = (
        {name: found for name, found in life.state.items() if name not in but} for life in lives
    )
    assert but <= lives[0].state.keys()
    for state in others:
        assert state == first


def assert_rates(lives: list[Life], row: Row, folder: Path) -> None:
    """Every step had the rate that this step has in the bare loop."""
    expected = train_bare(row.loop, folder, seeded=row.seeded).diary.rates
    for life in lives:
        assert life.diary.rates == expected[life.first : life.end]


def assert_every_sample_once(samples: list[int], row: Row) -> None:
    if row.even:
        assert sorted(samples) == list(range(SAMPLES))
    else:
        assert len(set(samples)) == len(samples)


@cases(Circumstance.ALONE, "local-sgd", "ddp")
@pytest.mark.every(5)
def test_alone_it_is_the_bare_loop(row: Row, method: Any, tmp_path: Path) -> None:
    bare = train_bare(row.loop, tmp_path, seeded=row.seeded)
    torch.manual_seed(7)
    (life,) = Job(tmp_path, 1, method=method).train(row.loop)
    assert life.diary.samples == bare.diary.samples
    assert life.diary.rates == bare.diary.rates
    assert (life.first, life.end) == (0, row.steps(1))
    tolerance = row.tolerances.get("ddp", 0.0) if method == "ddp" else 0.0
    if tolerance:
        assert life.ended is not None
        assert bare.ended is not None
        expected = bare.ended.model.state_dict()
        for name, value in life.ended.model.state_dict().items():
            assert (value - expected[name]).abs().max() <= tolerance, name
        return
    assert life.state == bare.state
    assert life.own == bare.own


@cases(Circumstance.TOGETHER, "diloco", "ddp")
@pytest.mark.every(5)
def test_together_members_end_with_one_model(row: Row, method: Any, tmp_path: Path) -> None:
    lives = Job(tmp_path, 2, method=method).train(row.loop)
    assert_one_model(lives, row)
    assert_every_sample_once([s for life in lives for s in life.diary.trained], row)
    if row.even:
        assert [life.end for life in lives] == [row.steps(2)] * 2
    assert_rates(lives, row, tmp_path)
    if method == "ddp":
        assert lives[0].own == lives[1].own


@cases(Circumstance.LOST, "diloco")
@pytest.mark.every(3)
def test_a_lost_member_comes_back(row: Row, method: Any, tmp_path: Path) -> None:
    lives, cut = Job(tmp_path, 2, method=method).train_losing(row.loop, "w1", after=3)
    assert (cut.first, cut.end) == (0, 3)
    assert lives[1].first == 2, "it begins where the last round has left the model"
    assert_one_model(lives, row, but=row.counted)
    assert_rates(lives, row, tmp_path)


@pytest.mark.parametrize("name", ["frozen", "unfrozen"])
def test_a_newcomer_with_other_frozen_weights_is_refused(name: str, tmp_path: Path) -> None:
    job = Job(tmp_path, 2, method=DILOCO)
    with pytest.raises(ConfigError, match=r"frozen parameters differ.*0\.weight, 0\.bias"):
        job.train_losing(ROWS[name].loop, "w1", after=3)


@cases(Circumstance.LOST_SHARE, "diloco")
@pytest.mark.every(4)
def test_the_share_of_a_lost_member_is_trained_on_once(
    row: Row, method: Any, tmp_path: Path
) -> None:
    lives, cut = Job(tmp_path, 2, method=method).train_losing(row.loop, "w1", after=3)
    if row.even:
        assert [life.end for life in lives] == [row.steps(2)] * 2
    kept = [s for step in cut.diary.samples[: lives[1].first] for s in step]
    assert_every_sample_once([*kept, *(s for life in lives for s in life.diary.trained)], row)


@cases(Circumstance.RESUMED, "diloco")
@pytest.mark.every(3)
def test_resumed_it_is_the_uninterrupted_run(row: Row, method: Any, tmp_path: Path) -> None:
    torch.manual_seed(7)
    whole = Job(tmp_path / "whole", 2, method=method, every=1).train(row.loop)
    torch.manual_seed(7)
    job = Job(tmp_path / "parted", 2, method=method, every=1)
    cut = job.train(row.loop, kill_after=5)
    assert [life.end for life in cut] == [5, 5]
    round_ = job.store.latest()
    lives = Job(job.folder, 2, method=method, every=1, resume=round_).train(row.loop)
    for life, expected in zip(lives, whole, strict=True):
        assert life.first == 4
        assert life.diary.samples == expected.diary.samples[4:]
        assert life.diary.rates == expected.diary.rates[4:]
        assert life.state == expected.state
        assert not row.keeps or life.own == expected.own


@cases(Circumstance.DIVIDED, "diloco", members=(1, 3))
@pytest.mark.every(5)
def test_resumed_by_another_number_of_members(
    row: Row, method: Any, members: int, tmp_path: Path
) -> None:
    job = Job(tmp_path, 2, method=method, every=1)
    job.train(row.loop, kill_after=5)
    round_ = job.store.latest()
    lives = Job(tmp_path, members, method=method, every=1, resume=round_).train(row.loop)
    assert {life.first for life in lives} == {4}
    assert_one_model(lives, row)
    # The data are divided again, from the beginning.
    samples = [s for life in lives for s in life.diary.trained]
    if row.begins_again:
        assert_every_sample_once(samples, row)
    assert len(set(samples)) == len(samples)
