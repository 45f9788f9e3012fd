"""Members of unequal loops: each does all of its own, and they end with one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import atoll
from atoll.errors import ConfigError
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


# ----------------------------------------------------------- the last step is known, or is not

STREAMING = atoll.Streaming(every=4, fragments=2, delay=1, mix=0.0)
ROUNDS = 1 + 6
"""Of 12 steps: the common start, five of a fragment, and one of both at the end."""


def train_streaming(folder: Path, *, known: int, steps: int, saved_after: int = 0) -> list[Tensor]:
    """Return each member's parameters at the end and, if asked, after a step; rounds at last."""

    def body(group: Group) -> list[Tensor]:
        found = []
        with make_run(folder, group) as run:
            model = small_model()
            optimizer = run.wrap(model, adamw(model), outer=STREAMING, codec="fp32", steps=known)
            stream = batches(run.slot)
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                squared_error(model, next(stream))[0].backward()  # type: ignore[no-untyped-call]
                run.log(tokens=BATCH)
                optimizer.step()
                if step == saved_after:
                    run.finish()
                    found.append(vector(model))
            run.finish()
            rounds = torch.tensor(group.committed_round)
        assert group.committed_round == rounds, "the end of the block finds nothing to do"
        return [*found, vector(model), rounds]

    first, second = MemoryGroups(2, timeout_s=PATIENCE_S).together(body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return first


@pytest.mark.parametrize(("known", "more"), [(12, 0), (0, 1), (8, 0)], ids=["known", "not", "past"])
def test_what_is_due_at_a_known_end_is_left_to_the_last_round(
    known: int, more: int, tmp_path: Path
) -> None:
    assert train_streaming(tmp_path, known=known, steps=12)[-1] == ROUNDS + more


def test_what_is_saved_before_the_known_end_has_all_steps(tmp_path: Path) -> None:
    known, unknown = (
        train_streaming(tmp_path, known=last, steps=12, saved_after=7) for last in (12, 0)
    )
    assert torch.equal(known[0], unknown[0])


def test_a_negative_number_of_steps_is_refused(tmp_path: Path) -> None:
    model = small_model()
    with pytest.raises(ConfigError, match="number of steps is too small"):
        make_run(tmp_path).wrap(model, adamw(model), steps=-1)
