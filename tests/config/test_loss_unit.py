"""What losses are measured in follows from the job."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.config import read_spec
from atoll.config.loss_unit import IMAGE_KINDS, loss_unit
from atoll.data.corpora import IMAGE_CORPORA


def test_image_kinds_are_those_that_can_be_loaded() -> None:
    assert {name.partition(":")[0] for name in IMAGE_CORPORA} == set(IMAGE_KINDS)


@pytest.mark.parametrize(
    ("tables", "unit"),
    [
        ({}, "nats per token"),
        ({"data": {"corpus": "folder:pictures@32"}, "model": {"name": "vit"}}, "nats per image"),
        ({"job": {"script": "train.py"}}, ""),
        ({"rl": {"policies": [{"name": "one", "env": "CartPole-v1"}]}}, ""),
        ({"tune": {"data": ["a.jsonl"]}, "model": {"source": "m"}}, "nats per token"),
        ({"tune": {"data": ["a.jsonl"], "objective": "dpo"}, "model": {"source": "m"}},
         "nats per pair"),
        ({"tune": {"data": ["a.jsonl"], "objective": "kto"}, "model": {"source": "m"}},
         "per answer"),
    ],
)  # fmt: skip
def test_the_unit_is_that_of_the_kind_of_loss(tables: dict[str, Any], unit: str) -> None:
    assert loss_unit(read_spec(tables)) == unit
