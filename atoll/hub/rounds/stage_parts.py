"""What completes a checkpoint of a model in stages: one file of each stage, of the same state."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.hub.jobs.jobs import Jobs
from atoll.hub.storage.files import Files
from atoll.hub.storage.merged_model import merged_model
from atoll.wire.malformed import MALFORMED
from atoll.wire.manifest import (
    ABOUT,
    ABOUT_NAME,
    HISTORY,
    STAMP,
    ManifestPart,
    checkpoint_folder,
    piece_file,
)
from atoll.wire.part_header import read_metadata

MODEL_NAME = "model.safetensors"


class About(msgspec.Struct):
    """The part of `ABOUT_NAME` that is read here."""

    texts: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class StageParts:
    """The files of stages of all jobs."""

    jobs: Jobs
    files: Files

    def names(self, job: str) -> list[str]:
        """Return the names of the files of a checkpoint; empty: the job has no stages."""
        return [piece_file(stage) for stage in range(self.jobs.get(job).spec.parts_saved)]

    def path(self, job: str, round_: int, name: str) -> Path:
        """Return where a file of a checkpoint is."""
        return self.jobs.folder(job) / checkpoint_folder(round_) / name

    async def history(self, job: str, round_: int) -> int:
        """Return the history of a checkpoint, see `SwarmPlace`; 0: the first, or no checkpoint."""
        path = self.path(job, round_, piece_file(0))
        text = (await asyncio.to_thread(read_metadata, path)).get(HISTORY, "")
        return int(text) if text.isdecimal() and len(text) < 19 else 0

    async def complete(
        self, job: str, round_: int, parts: Sequence[ManifestPart]
    ) -> list[ManifestPart]:
        """Return all entries of the manifest; empty: a stage is missing, or is of another state.

        Writes `ABOUT_NAME` from what the first stage's file says.
        """
        held = {part.name: part for part in parts}
        names = self.names(job)
        if not set(names) <= held.keys():
            return []

        def read() -> list[dict[str, str]]:
            return [read_metadata(self.path(job, round_, name)) for name in names]

        metadata = await asyncio.to_thread(read)
        if len({texts.get(STAMP, "") for texts in metadata}) != 1:
            return []  # one is of abandoned steps and will be replaced
        entries = [
            msgspec.structs.replace(held[name], member=f"stage{stage}")
            for stage, name in enumerate(names)
        ]
        about = metadata[0].get(ABOUT, "").encode()
        if not _is_about(about):
            about = msgspec.json.encode({"step": round_})
        await self.files.write(job, f"{checkpoint_folder(round_)}/{ABOUT_NAME}", about)
        digest = hashlib.sha256(about).hexdigest()
        entries.append(
            ManifestPart(name=ABOUT_NAME, member="stage0", sha256=digest, nbytes=len(about))
        )
        return entries

    async def publish_model(self, job: str, round_: int) -> None:
        """Write the weights of a complete checkpoint as the job's `model.safetensors`."""
        data = await asyncio.to_thread(self.path(job, round_, ABOUT_NAME).read_bytes)
        texts = msgspec.json.decode(data, type=About).texts
        numbers = {"step": str(round_), "round": str(round_), "job": job}
        paths = [self.path(job, round_, name) for name in self.names(job)]
        merged = merged_model(paths, {**texts, **numbers})
        await self.files.put(job, MODEL_NAME, merged, limited=False)


def _is_about(text: bytes) -> bool:
    """Return whether a member's description of a checkpoint can be read at the end of the job."""
    try:
        msgspec.json.decode(text, type=About)
    except MALFORMED:
        return False
    return True
