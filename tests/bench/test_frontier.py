"""The benchmark of fewest bytes: what is compared with what, and at which rate."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench import frontier
from bench.frontier import (
    BASES,
    CHOSEN_ON,
    ROWS,
    base_of,
    choices,
    comparison,
    further,
    key_of,
    once,
    own_choices,
    report,
    todo,
)
from bench.methods.ledger import Ledger
from bench.methods.rows import named
from bench.methods.running import Trial
from bench.methods.setting import SIZES, Setting
from bench.methods.together import fill

TINY = Setting(layers=1, width=16, context=16, batch=2, steps=12, held_out_tokens=1_024)
RATES = (1e-3, 2e-3, 4e-3)


def test_every_size_has_rates() -> None:
    assert frontier.RATES.keys() == SIZES.keys()


def kept(ledger: Ledger, trial: Trial, loss: float, sent: int) -> None:
    record = {"loss": loss, "sent_bytes": sent, "method": trial.row.name, "lr": trial.setting.lr}
    ledger.add({**key_of(trial), **record})


def test_rates_are_chosen_on_another_seed(tmp_path: Path) -> None:
    ledger, chosen = Ledger(tmp_path / "runs.jsonl"), choices(TINY, [2], RATES)
    assert {trial.seed for trial in chosen} == {CHOSEN_ON}
    assert own_choices(ledger, chosen, ROWS) == []  # no rate is known yet
    assert comparison(ledger, chosen, [0], ROWS) == []
    best = {True: 1.6e-2, False: 2e-3}  # by Muon and by AdamW
    for trial in chosen:
        kept(ledger, trial, abs(trial.setting.lr - best[bool(trial.row.train)]), sent=1)
    own = own_choices(ledger, chosen, ROWS)
    assert {t.setting.lr for t in own if t.row.train} == {1.6e-2, 0.8e-2, 3.2e-2}
    for trial in own:  # twice the rate suits `sparseloco` only
        kept(ledger, trial, trial.setting.lr * (-1 if trial.row.preset == "sparseloco" else 1), 1)
    trials = comparison(ledger, [*chosen, *own], [0], ROWS)
    assert len(trials) == len(BASES) + len(ROWS)
    rates = {(t.row.preset, bool(t.row.train), t.setting.lr) for t in trials}
    assert rates == {
        ("ddp", False, 2e-3), ("ddp", True, 1.6e-2), ("diloco", False, 1e-3),
        ("muloco", True, 0.8e-2), ("sparseloco", False, 4e-3), ("sparseloco", True, 3.2e-2),
    }  # fmt: skip


def test_a_rate_is_looked_for_beyond_the_outermost_ones(tmp_path: Path) -> None:
    ledger, chosen = Ledger(tmp_path / "runs.jsonl"), choices(TINY, [2], RATES)
    assert further(ledger, chosen) == []  # no rate is known yet
    for trial in chosen:
        kept(ledger, trial, -trial.setting.lr if trial.row.train else trial.setting.lr, sent=1)
    more = further(ledger, chosen)
    assert [(bool(t.row.train), t.setting.lr) for t in more] == [(False, 0.5e-3), (True, 3.2e-2)]
    for trial in more:
        kept(ledger, trial, 1.0, sent=1)
    assert further(ledger, [*chosen, *more]) == []


def test_methods_are_compared_with_ddp_by_their_own_optimizer(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "runs.jsonl")
    row = next(row for row in ROWS if row.preset == "muloco")
    losses = {base.name: loss for base, loss in zip(BASES, (2.0, 1.0), strict=True)}
    for base in BASES:
        kept(ledger, Trial(base, 2, 0, TINY), losses[base.name], sent=1000)
    kept(ledger, Trial(row, 2, 0, TINY), 1.5, sent=1)
    (found,) = report(ledger, TINY)
    assert (found["loss_gap"], found["over_adamw"], found["bytes_ratio"]) == (0.5, -0.25, 1000)
    assert list(report(ledger, dataclasses.replace(TINY, batch=4))) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_runs_are_kept_and_not_repeated(tmp_path: Path, processes: int) -> None:
    ledger, row = Ledger(tmp_path / "runs.jsonl"), named("diloco/int2 h35", ROWS)[0]
    trials = [Trial(base_of(row), 2, 0, TINY), Trial(row, 2, 0, TINY)]
    fill(ledger, todo(ledger, trials), once, processes=processes, deadline=float("inf"))
    assert [key_of(trial) in Ledger(ledger.path) for trial in trials] == [True, True]
    before = ledger.path.read_bytes()
    fill(ledger, todo(ledger, trials), once, processes=processes, deadline=float("inf"))
    assert ledger.path.read_bytes() == before
    fill(ledger, todo(ledger, [Trial(row, 2, 1, TINY)]), once, processes=processes, deadline=0.0)
    assert ledger.path.read_bytes() == before


def test_a_row_that_does_not_exist_is_refused() -> None:
    assert named("", ROWS) == list(ROWS)
    with pytest.raises(SystemExit, match="no row 'diloko'"):
        named("diloko", ROWS)


def test_the_frontier_goes_on_behind_a_run_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = named("diloco/int2 h35", ROWS)[0]
    wrong = dataclasses.replace(row, codec="no-codec")
    trials = [Trial(wrong, 2, 0, TINY), Trial(row, 2, 1, TINY)]
    ledger = Ledger(tmp_path / "runs.jsonl")
    fill(ledger, todo(ledger, trials), once, processes=1, deadline=float("inf"))
    assert [key_of(trial) in ledger for trial in trials] == [False, True]
    assert f"{trials[0].name}: FAILED" in capsys.readouterr().err
