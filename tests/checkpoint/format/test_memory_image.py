"""Images: one copy of the tensors makes the bytes of the file, and back without another."""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file
from torch import Tensor

from atoll.checkpoint.format.memory_image import MemoryImage, image_nbytes, part_of
from atoll.checkpoint.format.part import Part, part_blocks
from atoll.errors import CheckpointCorrupt, CheckpointError
from tests.tiers import examples

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


def every_kind() -> Part:
    tensors: dict[str, Tensor] = {str(kind): (torch.arange(5) % 2).to(kind) for kind in TYPES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "expanded": torch.ones(1).expand(4),
        "every second": torch.arange(8)[::2],
        "ünïcode/ \"'": torch.ones(2, 1, 2),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    return Part("w0.safetensors", tensors, {"z": "1", "ä": "2"})


def assert_equal(left: Part, right: Part) -> None:
    assert left.metadata == right.metadata
    assert left.tensors.keys() == right.tensors.keys()
    for name, tensor in left.tensors.items():
        other = right.tensors[name]
        assert tensor.dtype == other.dtype
        assert tensor.shape == other.shape
        assert torch.equal(tensor, other)


def bytes_of(header: Mapping[str, object], data: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def test_the_library_reads_an_image_and_so_do_we() -> None:
    part = every_kind()
    image = MemoryImage(part)
    assert image.nbytes == image_nbytes(part) == len(image.view)
    read = load(bytes(image.view))
    assert_equal(Part("", read, part.metadata), part)
    assert_equal(part_of(image.view, part.name), part)


def test_image_equals_the_streamed_file() -> None:
    part = every_kind()
    assert bytes(MemoryImage(part).view) == b"".join(part_blocks(part.tensors, part.metadata))


def test_bytes_do_not_depend_on_the_order_of_parts() -> None:
    part = every_kind()
    backwards = Part(
        part.name, dict(list(part.tensors.items())[::-1]), dict(list(part.metadata.items())[::-1])
    )
    assert bytes(MemoryImage(part).view) == bytes(MemoryImage(backwards).view)


def test_tensors_may_change_after_the_image_was_made() -> None:
    tensor = torch.ones(4)
    image = MemoryImage(Part("x", {"a": tensor}))
    tensor.zero_()
    assert part_of(image.view, "x").tensors["a"].tolist() == [1, 1, 1, 1]


def test_an_image_in_a_mapped_file_is_the_file(tmp_path: Path) -> None:
    part = every_kind()
    path = tmp_path / "x.safetensors"
    size = image_nbytes(part)
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), size)
        with MemoryImage(part, buffer=mapped):
            pass
        mapped.close()  # nothing holds it any more
    assert_equal(Part("", load_file(path), part.metadata), part)


def test_a_larger_buffer_is_used_as_far_as_needed() -> None:
    part = every_kind()
    buffer = bytearray(b"\xee" * (image_nbytes(part) + 64))
    image = MemoryImage(part, buffer=buffer)
    assert_equal(part_of(image.view, part.name), part)
    assert buffer[image.nbytes :] == b"\xee" * 64


@pytest.mark.parametrize("buffer", [bytearray(10), bytes(10_000)], ids=["short", "read only"])
def test_a_buffer_that_cannot_take_it_is_refused(buffer: bytearray | bytes) -> None:
    with pytest.raises(CheckpointError, match="does not fit the buffer"):
        MemoryImage(every_kind(), buffer=buffer)


def test_only_parts_of_a_writable_buffer_are_views() -> None:
    image = MemoryImage(Part("x", {"a": torch.ones(4)}))
    constant = bytes(image.view)
    part_of(image.view, "x").tensors["a"].fill_(7)
    assert part_of(image.view, "x").tensors["a"].tolist() == [7, 7, 7, 7]
    part_of(constant, "x").tensors["a"].fill_(7)
    assert part_of(constant, "x").tensors["a"].tolist() == [1, 1, 1, 1]


def test_views_keep_their_memory_after_the_image_is_released() -> None:
    image = MemoryImage(Part("x", {"a": torch.arange(1000)}))
    part = part_of(image.view, "x")
    image.release()
    with pytest.raises(CheckpointError, match="after its release"):
        _ = image.view
    assert torch.equal(part.tensors["a"], torch.arange(1000))


def test_a_tensor_that_another_writer_did_not_align_is_read() -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
    }
    data = bytearray(bytes_of(header, b"\x05" + struct.pack("<f", 2.5)))
    assert part_of(data, "x").tensors["b"].item() == 2.5


def test_types_outside_the_format_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"tensor z cannot be saved; given: torch.complex128"):
        MemoryImage(Part("x", {"z": torch.zeros(1, dtype=torch.complex128)}))
    with pytest.raises(CheckpointError, match=r"tensor z cannot be saved.*sparse"):
        MemoryImage(Part("x", {"z": torch.eye(2).to_sparse()}))


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


LIES: dict[str, bytes] = {
    "nothing": b"",
    "a few bytes": b"hello",
    "a huge header": b"\xff" * 100,
    "a header past the end": struct.pack("<Q", 93) + b" " * 92,
    "no object": b"\x02\0\0\0\0\0\0\0[]",
    "not JSON": b"\x02\0\0\0\0\0\0\0{x",
    "not UTF-8": b'\x04\0\0\0\0\0\0\0{"\xff"',
    "deep nesting": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a tensor past the end": bytes_of({"a": entry(shape=[4], data_offsets=[0, 16])}, bytes(8)),
    "a tensor before the start": bytes_of({"a": entry(data_offsets=[-8, 0])}, bytes(8)),
    "bytes left over": bytes_of({"a": entry()}, bytes(9)),
    "a gap": bytes_of({"a": entry(data_offsets=[8, 16])}, bytes(16)),
    "an overlap": bytes_of({"a": entry(), "b": entry()}, bytes(8)),
    "the wrong shape": bytes_of({"a": entry(shape=[3])}, bytes(8)),
    "a huge shape": bytes_of({"a": entry(shape=[2**62, 2**62, 4])}, bytes(8)),
    "a negative shape": bytes_of({"a": entry(shape=[-1, -2])}, bytes(8)),
    "a shape of truths": bytes_of({"a": entry(shape=[True, 2])}, bytes(8)),
    "a hundred dimensions": bytes_of({"a": entry(shape=[1] * 99 + [2])}, bytes(8)),
    "an infinite end": bytes_of({"a": entry(data_offsets=[0, 1e400])}, bytes(8)),
    "an unknown type": bytes_of({"a": entry(dtype="F33")}, bytes(8)),
    "no type": bytes_of({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "an entry that is text": bytes_of({"a": "b"}, bytes(8)),
    "metadata that are numbers": bytes_of({"__metadata__": {"a": 1}}),
    "metadata that are a list": bytes_of({"__metadata__": ["a"]}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_buffer_that_is_no_part_is_refused(lie: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"x\.safetensors cannot be read"):
        part_of(bytearray(LIES[lie]), "x.safetensors")


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_no_alteration_of_the_header_reaches_torch_unchecked(data: st.DataObject) -> None:
    view = bytearray(MemoryImage(every_kind()).view)
    (length,) = struct.unpack_from("<Q", view)
    for _ in range(data.draw(st.integers(1, 3))):
        view[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(view)))
    for candidate in (view, view[:cut]):
        try:
            part_of(candidate, "x")
        except CheckpointCorrupt:
            continue


def fastest(action: Callable[[], object]) -> float:
    times = []
    for _ in range(15):
        started = time.process_time()  # others may run meanwhile
        action()
        times.append(time.process_time() - started)
    return min(times)


def test_image_in_warm_memory_costs_about_one_copy() -> None:
    torch.manual_seed(0)
    tensors = {f"model/{i}": torch.randn(512, 512) for i in range(48)}
    part = Part("shared.safetensors", tensors)
    size = image_nbytes(part)
    buffer, source, target = bytearray(size), torch.ones(size).byte(), torch.ones(size).byte()
    copy_s = fastest(lambda: target.copy_(source))
    assert (
        fastest(lambda: MemoryImage(part, buffer=buffer)) < 4 * copy_s + 0.01
    )  # noise of the machine
