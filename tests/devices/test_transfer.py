"""Tests copies to a device; the processor, to which nothing is copied."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from atoll.devices.choose import count
from atoll.devices.facts import facts, memory, used_bytes
from atoll.devices.runtime import backend, generators, random_states, synchronize
from atoll.devices.transfer import Ahead, copy_tensors, placed, staged_groups

CPU = torch.device("cpu")


class Pair(NamedTuple):
    inputs: Tensor
    name: str


def test_nothing_is_copied_to_where_it_is() -> None:
    one = torch.ones(3)
    lists: defaultdict[str, Any] = defaultdict(list, g=one)
    values = {
        "a": [one, 3], "b": (one, "text"), "c": Pair(one, "x"), "d": OrderedDict(e=one), "f": lists,
    }  # fmt: skip
    found = placed(values, CPU)
    assert found == values
    assert found["a"][0] is one
    assert found["b"][0] is one
    assert isinstance(found["c"], Pair)
    assert isinstance(found["d"], OrderedDict)
    assert found["f"]["g"] is one
    assert found["f"]["h"] == []


def test_a_batch_ahead_is_the_batch() -> None:
    ahead, batch = Ahead(CPU), (torch.ones(2), torch.zeros(2))
    ahead.start(batch)
    assert ahead.take()[0] is batch[0]


def test_the_processor_has_no_memory_of_its_own() -> None:
    assert memory(CPU) == (0, 0)
    assert used_bytes(CPU) == 0
    found = facts(CPU)
    assert (found.device, found.bf16, found.float64) == ("cpu", False, True)


def test_the_processor_has_gloo_and_one_generator() -> None:
    synchronize(CPU)
    assert backend(CPU) == "gloo"
    assert backend(torch.device("cuda:0")) == "cpu:gloo,cuda:nccl"
    assert backend(torch.device("mps")) == "gloo"
    assert generators(CPU) == [torch.default_generator]
    assert len(random_states()) == count()


def test_tensors_of_one_device_are_copied_directly() -> None:
    to = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)]
    copy_tensors(to, [torch.arange(3.0), torch.ones(2, 2)])
    assert to[0].tolist() == [0.0, 1.0, 2.0]
    assert to[1].sum() == 4.0
    copy_tensors([], [])


def test_stages_hold_every_value_once() -> None:
    shapes = [(3,), (70, 5), (), (1, 1000), (2, 3, 4)]
    of = [torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) for shape in shapes]
    to = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for group in staged_groups(list(zip(to, of, strict=True)), 512):
        assert sum(max(a.nbytes, b.nbytes) for a, b in group) <= 512
        for part, source in group:
            part.add_(source)
    assert all(torch.equal(a, b.double()) for a, b in zip(to, of, strict=True))


def test_a_packed_sequence_keeps_its_sizes_in_main_memory() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    found = placed({"x": packed}, torch.device("meta"))["x"]
    assert isinstance(found, PackedSequence)
    assert found.data.device.type == "meta"
    assert found.unsorted_indices is not None
    assert found.unsorted_indices.device.type == "meta"
    assert found.batch_sizes is packed.batch_sizes
