"""Keras 3 on torch: `fit` with a wrapped optimizer trains what a loop by hand trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import atoll as package
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.run import Run
from atoll.run.place import Membership

os.environ.setdefault("KERAS_BACKEND", "torch")
keras: Any = pytest.importorskip("keras", reason="pip install keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras computes with another library than torch", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
STEPS, BATCH = 10, 8


def make_model() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        keras.Input((6,)), keras.layers.Dense(16, activation="relu"),
        keras.layers.LayerNormalization(), keras.layers.Dense(3),
    ])  # fmt: skip


def loader_of(run: Run) -> Any:
    """Return this member's share of the samples."""
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * STEPS * BATCH, 6, generator=source)
    return run.shard(DataLoader(TensorDataset(inputs, inputs.argmax(1) % 3), batch_size=BATCH))


def fitted(model: Any, run: Run, optimizer: Any) -> None:
    class Fitted(keras.Model):  # type: ignore[misc]
        def call(self, inputs: Tensor, *, training: bool = False) -> Any:
            return model(inputs, training=training)

        def train_step(self, data: Any) -> dict[str, Tensor]:
            inputs, targets = data
            loss = functional.cross_entropy(self(inputs, training=True), targets.long())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            run.log(loss=loss, tokens=len(targets))
            optimizer.step()
            return {"loss": loss.detach()}

    trainer = Fitted()
    trainer.compile(jit_compile=False)
    batches = (tuple(batch) for batch in loader_of(run))  # what Keras knows
    trainer.fit(batches, steps_per_epoch=STEPS, shuffle=False, verbose=0)


def by_hand(model: Any, run: Run, optimizer: Any) -> None:
    for inputs, targets in loader_of(run):
        loss = functional.cross_entropy(model(inputs, training=True), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        run.log(loss=loss, tokens=len(targets))
        optimizer.step()


@pytest.mark.parametrize("outer", ["ddp", package.DiLoCo(every=4)])
def test_fit_ends_as_the_loop_by_hand(tmp_path: Path, outer: Any) -> None:
    def train(loop: Any) -> list[list[np.ndarray[Any, Any]]]:
        models = [make_model() for _ in range(2)]

        def body(group: Group) -> list[np.ndarray[Any, Any]]:
            slot = int(group.me[1:])
            with Run(group, Membership(tmp_path, slot=slot, num_slots=2)) as run:
                model = models[slot]
                inner = torch.optim.AdamW(model.parameters(), 1e-2)
                loop(model, run, run.wrap(model, inner, outer=outer))
                run.finish()
            return [np.array(weight) for weight in model.get_weights()]

        return MemoryGroups(2).together(body)

    first, second = train(fitted)
    native, _ = train(by_hand)
    for ours, theirs, wanted in zip(first, second, native, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, wanted, atol=1e-6)
    assert any(np.abs(one - two).max() > 1e-3 for one, two in zip(
        first, make_model().get_weights(), strict=True
    ))  # fmt: skip
