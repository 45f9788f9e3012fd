"""Nested state survives the way through flat tensors and JSON, with its types."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.checkpoint.format.nested import flatten, nest
from atoll.errors import CheckpointCorrupt, CheckpointError
from tests.tiers import examples


def there_and_back(state: Any) -> Any:
    tensors, tree = flatten(state, prefix="p")
    return nest(tree, tensors)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.dictionaries(st.just("$"), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=examples(200), deadline=None)
@given(plain)
def test_plain_state_comes_back_equal_and_with_its_types(state: Any) -> None:
    back = there_and_back(state)
    assert back == state
    assert repr(back) == repr(state)


def test_optimizer_state_keeps_its_integer_keys_and_tuples() -> None:
    parameter = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(4)
    optimizer.step()
    state = optimizer.state_dict()
    back = there_and_back(state)
    assert back["param_groups"] == state["param_groups"]
    assert list(back["state"]) == [0]
    assert torch.equal(back["state"][0]["exp_avg"], state["state"][0]["exp_avg"])


def test_keys_that_look_alike_stay_apart() -> None:
    back = there_and_back({1: torch.zeros(1), "1": torch.ones(1)})
    assert back[1].item() == 0.0
    assert back["1"].item() == 1.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_floats_that_json_lacks_survive(value: float) -> None:
    back = there_and_back([value])[0]
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_numpy_arrays_come_back_as_arrays_and_scalars_as_numbers() -> None:
    back = there_and_back({"a": np.arange(3, dtype=np.uint32), "n": np.float32(0.5)})
    assert back["a"].dtype == np.uint32
    assert back["a"].tolist() == [0, 1, 2]
    assert back["n"] == 0.5


def test_a_tensor_under_two_names_is_stored_once() -> None:
    tied = torch.randn(3)
    tensors, tree = flatten({"a": tied, "b": tied, "c": tied[:2], "d": tied.clone()}, prefix="p")
    assert len(tensors) == 3
    assert nest(tree, tensors)["b"] is nest(tree, tensors)["a"]


def test_empty_tensors_keep_their_shapes() -> None:
    back = there_and_back({"a": torch.empty(0, 2), "b": torch.empty(3, 0)})
    assert (back["a"].shape, back["b"].shape) == ((0, 2), (3, 0))


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {"b": object()}}, "p/a/b cannot be saved; given: builtins.object"),
        ([{"f": len}], "p/0/f"),
        ({(1, 2): 3}, "a key of p"),
        ({True: 3}, "a key of p"),
        ({1.5: 3}, "a key of p"),
        ({"a": {1, 2}}, "p/a"),
        ({"t": torch.zeros(2).to_sparse()}, "p/t"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_place(state: Any, place: str) -> None:
    with pytest.raises(CheckpointError, match=place):
        flatten(state, prefix="p")


@pytest.mark.parametrize(
    "tree",
    ["", "{", '{"$":"tensor"}', '{"$":"tensor","name":"no"}', '{"$":"pickle"}', '{"$":[]}',
     "[" * 100_000],
    ids=lambda tree: tree[:20],
)  # fmt: skip
def test_malformed_state_is_refused(tree: str) -> None:
    tensors: dict[str, Tensor] = {}
    with pytest.raises(CheckpointCorrupt, match="malformed"):
        nest(tree, tensors)
