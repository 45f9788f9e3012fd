"""Checkpoints in stages: what their members wrote into them is checked before it is published."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.hub.rounds.stage_parts import StageParts
from atoll.hub.stores import Stores
from atoll.wire.manifest import (
    ABOUT,
    ABOUT_NAME,
    HISTORY,
    STAMP,
    ManifestPart,
    checkpoint_folder,
    piece_file,
)
from atoll.wire.part_header import LENGTH
from tests.hub.durable import with_stores
from tests.hub.swarm.test_swarm_service import TABLES

ROUND = 3


def part(texts: dict[str, str]) -> bytes:
    """Return a file of a stage with these texts and one tensor."""
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    head = msgspec.json.encode({"__metadata__": texts, "model/a": tensor})
    return LENGTH.pack(len(head)) + head + bytes(4)


@pytest.mark.parametrize("about", ["[", "7", '{"texts": 5}', "[" * 5000])
def test_unreadable_words_of_a_saver_do_not_keep_the_model_back(tmp_path: Path, about: str) -> None:
    async def test(stores: Stores) -> None:
        job = (await stores.jobs.create(TABLES, files={})).job
        stages = StageParts(stores.jobs, stores.files)
        entries = []
        for name in stages.names(job):
            data = part({STAMP: "s", ABOUT: about, HISTORY: "9" * 5000})
            await stores.files.write(job, f"{checkpoint_folder(ROUND)}/{name}", data)
            sha256 = hashlib.sha256(data).hexdigest()
            entries.append(ManifestPart(name=name, member="w0", sha256=sha256, nbytes=len(data)))
        found = await stages.complete(job, ROUND, entries)
        assert [one.name for one in found] == [piece_file(0), piece_file(1), ABOUT_NAME]
        text: Any = msgspec.json.decode(stages.path(job, ROUND, ABOUT_NAME).read_bytes())
        assert text == {"step": ROUND}
        await stages.publish_model(job, ROUND)
        assert (stores.jobs.folder(job) / "model.safetensors").is_file()
        assert await stages.history(job, ROUND) == 0

    with_stores(tmp_path, test)
