from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError, DataError
from atoll.queues import serialization

PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def there_and_back(value: Any) -> Any:
    return serialization.decode(b"".join(serialization.encode(value)))


@given(PLAIN)
def test_what_json_can_say_comes_back(value: Any) -> None:
    assert there_and_back(value) == value


@given(st.binary(max_size=40) | st.binary(max_size=9).map(lambda b: serialization.MAGIC + b))
def test_bytes_come_back_as_they_are_whatever_they_begin_with(value: bytes) -> None:
    assert there_and_back(value) == value


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool],
)
def test_tensors_come_back_with_their_type_and_shape(dtype: torch.dtype) -> None:
    value = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "turned": torch.arange(6).reshape(2, 3).t().to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "one": torch.tensor(1, dtype=dtype),
    }
    found = there_and_back(value)
    assert found.keys() == value.keys()
    for name, tensor in value.items():
        assert found[name].dtype == dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i8", "u1", "?"])
def test_arrays_come_back_with_their_values(dtype: str) -> None:
    value = {"a": np.arange(6).reshape(2, 3).astype(dtype), "none": np.empty((0, 2), dtype)}
    found = there_and_back(value)
    assert np.array_equal(found["a"], value["a"])
    assert found["a"].dtype == value["a"].dtype.newbyteorder("=")
    assert found["none"].shape == (0, 2)


def test_large_arrays_are_not_copied_to_be_sent() -> None:
    array = np.zeros(100_000, np.float32)
    parts = serialization.encode({"a": array})
    array[0] = 7.0
    assert serialization.decode(b"".join(parts))["a"][0] == 7.0


def test_what_could_only_be_pickled_is_refused() -> None:
    for value in (object(), {"a": object()}, {"a": torch.ones(1), "b": 3}, {1, 2}):
        with pytest.raises(ConfigError, match="cannot be put"):
            serialization.encode(value)


@given(st.binary(max_size=60))
def test_damaged_payloads_are_named_and_run_nothing(body: bytes) -> None:
    for kind in b"jntx":
        found: object = None
        with contextlib.suppress(DataError):
            found = serialization.decode(serialization.MAGIC + bytes([kind]) + body)
        assert found is None or kind != ord("x")
