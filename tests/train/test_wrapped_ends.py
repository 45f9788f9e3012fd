"""Members of unequal loops: each does all of its own, and they end with one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.parameter_server import Asynchronous, Server
from tests.contracts.strategy_suite import BATCH, adamw, batches, small_model, squared_error
from tests.patience import PATIENCE_S
from tests.train.test_wrapped import make_run, vector


@pytest.mark.parametrize(
    "outer",
    [
        pytest.param(Asynchronous(every=2, anchor_every=4), id="async-diloco"),
        pytest.param(Server(mode="asynchronous", anchor_every=4), id="async-sgd"),
    ],
)
def test_the_slow_member_does_its_whole_loop(outer: object, tmp_path: Path) -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)
    groups.coordinator.servers.speeds.update(w0=1.0, w1=0.25)
    loops = {"w0": 6, "w1": 24}

    def body(group: Group) -> tuple[Tensor, int]:
        with make_run(tmp_path, group) as run:
            model = small_model()
            optimizer = run.wrap(model, adamw(model), outer=outer)
            stream, done = batches(run.slot), 0
            for _ in range(loops[group.me]):
                optimizer.zero_grad()
                squared_error(model, next(stream))[0].backward()  # type: ignore[no-untyped-call]
                run.log(tokens=BATCH)
                optimizer.step()
                done += 1
        return vector(model), done

    (fast, few), (slow, many) = groups.together(body)
    assert (few, many) == (6, 24)
    assert torch.equal(fast, slow)
