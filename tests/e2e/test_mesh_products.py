"""Every product of two axes, as the command starts it: four processes train what one does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from atoll.checkpoint import load_weights
from atoll.config.mesh import AXES
from tests.e2e.conftest import Atoll, shared_cache
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

TEXT: dict[str, dict[str, Any]] = {
    "model": {"layers": 4, "width": 32, "heads": 4, "context": 16},
    "train": {"steps": 3, "batch": 8, "optimizer": "sgd", "lr": 0.1, "warmup": 1},
}
TIED = {"name": "gpt", "tie": True}
UNTIED = {"name": "llama", "tie": False}
WHOLE_VOCABULARY = {"vocabulary": False}

Product = tuple[tuple[str, str], dict[str, Any], dict[str, Any]]
"""Two axes of two ranks each, the model, and further keys of `[island]`."""

PRODUCTS: list[Product] = [
    (("pipeline", "tensor"), TIED, {}),
    (("replicate", "shard"), UNTIED, {}),
    (("replicate", "pipeline"), TIED, {}),
    (("replicate", "tensor"), UNTIED, {}),
    (("shard", "pipeline"), UNTIED, {}),
    (("shard", "tensor"), TIED, WHOLE_VOCABULARY),
]


def test_the_products_below_are_all_there_are() -> None:
    assert {axes for axes, _, _ in PRODUCTS} == set(itertools.combinations(AXES, 2))


def _label(case: Product) -> str:
    axes, model, words = case
    return "-".join([*axes, str(model["name"]), *words])


class Batch:
    """The jobs of some products, and of one process for each model, in one run of the command."""

    def __init__(self, atoll: Atoll, products: list[Product]) -> None:
        self._atoll = atoll
        text = atoll.folder / "text.txt"
        text.write_text("".join(f"line {n} of {n * n}\n" for n in range(500)))
        targets = [
            self._job(_label(case), case[1], {"mesh": dict.fromkeys(case[0], 2), **case[2]})
            for case in products
        ]
        models = {str(model["name"]): model for _, model, _ in products}
        targets += [self._job(name, model, {}) for name, model in models.items()]
        # A mesh that never begins fails after two of its own time limits, not after this one.
        self.done = atoll.run(
            "run", *(str(path) for path in targets), "--local", "2", timeout_s=2 * PATIENCE_S
        )

    def _job(self, name: str, model: dict[str, Any], island: dict[str, Any]) -> Path:
        tables: dict[str, dict[str, Any]] = {
            "job": {"name": name, "nodes": 1, "threads": 1, "device": "cpu"},
            "model": TEXT["model"] | model,
            "data": {"corpus": f"files:{self._atoll.folder / 'text.txt'}"},
            "train": TEXT["train"] | {"eval_tokens": 256},
            "strategy": {"preset": "alone", "inner": "hybrid" if island else "local"},
        }
        if island:
            tables["island"] = {"timeout_s": 60, **island}
        path = self._atoll.folder / f"{name}.toml"
        path.write_text("\n".join(f"[{name}]\n{_lines(table)}" for name, table in tables.items()))
        return path

    def folder(self, name: str) -> Path:
        """Return the results of a job."""
        found = [path for path in self._atoll.runs.glob(f"{name}-*") if path.is_dir()]
        (exact,) = [path for path in found if _name_of(path) == name]
        return exact

    def weights(self, name: str) -> dict[str, Tensor]:
        """Return the model that a job has trained."""
        return load_weights(self.folder(name) / "model.safetensors").state


def _lines(table: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {_toml(value)}" for key, value in table.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def _name_of(folder: Path) -> str:
    """Return a job's name: what is before date, time and suffix in the name of its folder."""
    return folder.name.rpartition("-")[0].rpartition("-")[0]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batch]:
    atoll = Atoll(tmp_path_factory.mktemp("products"), cache=shared_cache(tmp_path_factory))
    try:
        yield Batch(atoll, PRODUCTS)
    finally:
        atoll.end()


def test_pipeline_and_tensor_train_what_one_process_does(atoll: Atoll) -> None:
    """The product of the most kinds of communication: one axis sends, the other reduces."""
    check(Batch(atoll, PRODUCTS[:1]), PRODUCTS[0])


@pytest.mark.parametrize("case", PRODUCTS, ids=_label)
@pytest.mark.long(
    "tests/e2e/test_mesh_products.py::test_pipeline_and_tensor_train_what_one_process_does"
)
def test_a_product_trains_what_one_process_does(batch: Batch, case: Product) -> None:
    check(batch, case)


def check(batch: Batch, case: Product) -> None:
    """Compare the parameters that a product and one process have trained."""
    assert batch.done.code == 0, batch.done.both
    found, expected = batch.weights(_label(case)), batch.weights(str(case[1]["name"]))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        worst = float((found[name] - tensor).abs().max())
        assert worst <= 2e-5, f"{name}: {worst}"
