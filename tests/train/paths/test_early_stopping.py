"""A path ends as it was when the loss on its own held-out documents was least."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.train.build import build
from atoll.train.evaluate import evaluate
from atoll.train.paths.data import path_data
from tests.train.paths.kit import job_of, run_paths


@pytest.mark.parametrize("rescale", ["none", "sqrt"])
def test_each_path_ends_with_its_best_weights(tmp_path: Path, rescale: str) -> None:
    more = f'rescale = "{rescale}"'
    spec = job_of(tmp_path, [2, 1], nodes=2, steps=24, held_out=0.1, more=more)
    spec = replace(spec, train=replace(spec.train, eval_every=1, lr=0.3, clip=0.0))
    found = run_paths(spec, tmp_path, members=2)
    built = build(spec, member="w0", slot=0, num_slots=2)
    data = path_data(spec, built)
    assert data.held_out is not None
    for path, best in found.hub.book.best.items():
        built.model.load_state_dict(found.weights[path])
        look = evaluate(built.model, data.held_out(path), limit_tokens=spec.train.eval_tokens)
        assert look.loss == pytest.approx(best, rel=1e-6)
        last = found.hub.book.progress[path].held_out
        assert last is not None
        assert best <= last
