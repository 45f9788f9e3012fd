"""Scripts in islands: a user's own spread model, with outer strategies around its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import atoll
from atoll.group.alone import Alone
from atoll.run import Run
from tests.island.pool import Ranks
from tests.island.script_kit import WAYS, enter, net, train, whole

OUTERS: dict[str, Any] = {
    "diloco": atoll.DiLoCo(every=3, outer_lr=0.8, outer_momentum=0.5),
    "streaming": atoll.Streaming(every=4, fragments=2),
    "cocktail": atoll.Cocktail(),
    "slowmo": atoll.SlowMo(every=3, slow_momentum=0.4),
}


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def _spread(way: str, outer: str, folder: str) -> tuple[dict[str, Tensor], list[float], int]:
    shape, spread = WAYS[way]
    with enter(shape, folder=Path(folder)) as run:
        model = spread(net(), run)
        optimizer = run.wrap(model, adamw(model), outer=OUTERS[outer])
        losses = train(run, model, optimizer)
        run.finish()
        found = whole(model)
    return found, losses, run.step


def _plain(outer: str, folder: Path) -> dict[str, Tensor]:
    with Run(Alone(), slot=0, num_slots=1, directory=folder, seed=7) as run:
        model = net()
        optimizer = run.wrap(model, adamw(model), outer=OUTERS[outer])
        train(run, model, optimizer)
    return whole(model)


@pytest.mark.parametrize(
    ("way", "outer"),
    [
        ("fsdp", "diloco"), ("ddp", "diloco"), ("tensor", "diloco"), ("both", "diloco"),
        ("fsdp", "streaming"), ("fsdp", "cocktail"), ("tensor", "slowmo"),
    ],
)  # fmt: skip
def test_a_spread_model_ends_as_the_whole_one(
    ranks: Ranks, tmp_path: Path, way: str, outer: str
) -> None:
    found = ranks.run(4 if way == "both" else 2, _spread, way, outer, str(tmp_path))
    expected = _plain(outer, tmp_path)
    for parameters, _, step in found:
        assert step == 8
        assert parameters.keys() == expected.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
