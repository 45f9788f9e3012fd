"""Parts are safetensors files: the library reads ours, we read the library's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.checkpoint.files import write_file
from atoll.checkpoint.format.part import part_blocks, read_part
from atoll.errors import CheckpointCorrupt, CheckpointError

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


def every_kind() -> dict[str, Tensor]:
    tensors = {str(kind): (torch.arange(5) % 2).to(kind) for kind in TYPES}
    return tensors | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "expanded": torch.ones(1).expand(4),
        "ünïcode/ \"'": torch.ones(2, 1, 2),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def test_the_library_reads_what_is_written_here(tmp_path: Path) -> None:
    tensors = every_kind()
    write_file(tmp_path / "x.safetensors", part_blocks(tensors, {"ä": "1"}))
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(same(read[name], tensors[name]) for name in tensors)
    part = read_part(tmp_path / "x.safetensors")
    assert part.metadata == {"ä": "1"}
    assert all(same(part.tensors[name], tensors[name]) for name in tensors)


def test_what_the_library_writes_is_read_here(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3)}, tmp_path / "x.safetensors", {"k": "v"})
    part = read_part(tmp_path / "x.safetensors")
    assert part.tensors["a"].tolist() == [0, 1, 2]
    assert part.metadata == {"k": "v"}


def test_no_tensors_and_no_metadata_is_a_valid_part(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", part_blocks({}, {}))
    assert load_file(tmp_path / "x.safetensors") == {}
    assert read_part(tmp_path / "x.safetensors").metadata == {}


def test_the_same_state_gives_the_same_bytes() -> None:
    tensors = every_kind()
    backwards = dict(reversed(tensors.items()))
    one, two = (b"".join(part_blocks(t, {"k": "v"})) for t in (tensors, backwards))
    assert one == two


def test_a_type_outside_the_format_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"tensor z cannot be saved; given: torch.complex128"):
        list(part_blocks({"z": torch.zeros(1, dtype=torch.complex128)}, {}))


@pytest.mark.parametrize("data", [b"", b"hello", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_file_that_is_no_part_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"x\.safetensors cannot be read"):
        read_part(path)
