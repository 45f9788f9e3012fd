"""Tests copies to a device; the processor, to which nothing is copied."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.devices.facts import facts, memory, used_bytes
from atoll.devices.runtime import backend, generators, random_states, synchronize
from atoll.devices.transfer import Ahead, host_tensor, placed

CPU = torch.device("cpu")


class Pair(NamedTuple):
    inputs: Tensor
    name: str


def test_nothing_is_copied_to_where_it_is() -> None:
    one = torch.ones(3)
    values = {"a": [one, 3], "b": (one, "text"), "c": Pair(one, "x"), "d": OrderedDict(e=one)}
    found = placed(values, CPU)
    assert found == values
    assert found["a"][0] is one
    assert found["b"][0] is one
    assert isinstance(found["c"], Pair)
    assert isinstance(found["d"], OrderedDict)


def test_a_batch_ahead_is_the_batch() -> None:
    ahead, batch = Ahead(CPU), (torch.ones(2), torch.zeros(2))
    ahead.start(batch)
    assert ahead.take()[0] is batch[0]


def test_the_processor_has_no_memory_of_its_own() -> None:
    assert memory(CPU) == (0, 0)
    assert used_bytes(CPU) == 0
    assert host_tensor(4, CPU).shape == (4,)
    found = facts(CPU)
    assert (found.device, found.bf16, found.float64) == ("cpu", False, True)


def test_the_processor_has_gloo_and_one_generator() -> None:
    synchronize(CPU)
    assert backend(CPU) == "gloo"
    assert backend(torch.device("cuda:0")) == "cpu:gloo,cuda:nccl"
    assert backend(torch.device("mps")) == "gloo"
    assert generators(CPU) == [torch.default_generator]
    assert random_states() == []
