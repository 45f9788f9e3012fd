"""The built-in trainer over a pipeline that is not flushed between batches."""

from __future__ import annotations

from pathlib import Path

from atoll.checkpoint import DirectoryStore
from tests.island.pool import Ranks
from tests.island.trainer.test_trainer import Tables, close, run_job, tables, weights
from tests.island.trainer.test_trainer import corpus as corpus


def test_an_asynchronous_pipeline_resumes_bit_for_bit(
    ranks: Ranks, corpus: str, tmp_path: Path
) -> None:
    options = {"betas": [0.99, 0.999], "decoupled_weight_decay": True}
    more: Tables = {
        "job": {"nodes": 1}, "model": {"tie": False}, "checkpoint": {"every": 1},
        "train": {"steps": 9, "optimizer": "torch:NAdam", "options": options},
        "island": {"schedule": "async", "microbatches": 2, "activations": "subspace:4|int8"},
    }  # fmt: skip
    given, run = tables(corpus, {"pipeline": 2}, **more), tmp_path / "run"
    ranks.run(2, run_job, given, run, 1, 4, -1)
    reached = DirectoryStore(run / "store").latest()
    (end,), _ = ranks.run(2, run_job, given, run, 1, 0, reached)
    (expected,), _ = ranks.run(2, run_job, given, tmp_path / "whole", 1, 0, -1)
    assert end["steps"] == expected["steps"] == 9
    assert end["digest"] == expected["digest"]
    assert end["loss_final"] == expected["loss_final"]
    close(weights(run), weights(tmp_path / "whole"), within=0.0)
