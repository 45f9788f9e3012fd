"""Files of stages that a member made wrongly."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import WireError
from atoll.hub.storage.merged_model import merged_model
from atoll.wire.manifest import MODEL_PREFIX
from atoll.wire.part_header import LENGTH

GOOD: dict[str, Any] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def merge(folder: Path, odd: dict[str, Any]) -> bytes:
    """Merge a file with a tensor of four bytes, and another one with this entry."""
    entries = {MODEL_PREFIX + "good": GOOD, MODEL_PREFIX + "odd": odd}
    head = json.dumps(entries).encode()
    path = folder / "stage-0.safetensors"
    path.write_bytes(LENGTH.pack(len(head)) + head + b"data")

    async def read() -> bytes:
        return b"".join([block async for block in merged_model([path], {})])

    return asyncio.run(read())


def test_a_tensor_with_an_odd_entry_is_refused(tmp_path: Path) -> None:
    assert merge(tmp_path, GOOD).endswith(b"datadata")
    for changes in (
        {"dtype": None},
        {"dtype": "F" + "9" * 5_000},
        {"data_offsets": [4, 0]},
        {"data_offsets": [-4, 0]},
        {"data_offsets": [0, 4, 4]},
        {"data_offsets": ["0", "4"]},
    ):
        with pytest.raises(WireError, match="not a part"):
            merge(tmp_path, GOOD | changes)
    with pytest.raises(WireError, match="not a part"):
        merge(tmp_path, {"shape": [1], "data_offsets": [0, 4]})
