"""Records of tar files in WebDataset's form: files whose names begin alike are one record.

    KEY.json            an object: its columns
    KEY.txt             the column `text`
    KEY.NAME.txt        the column NAME, e.g. 7.prompt.txt and 7.completion.txt
    KEY.cls             the column `label`, a number

https://github.com/webdataset/webdataset. The files of a record follow each other; hidden ones do
not count. A shard is read from its beginning to its end, plain or compressed, and nothing is
unpacked to the disk.
"""

from __future__ import annotations

import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.errors import DataError

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Suffixes that say that examples are pictures."""
TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")

_LONGEST = 1 << 27
"""Largest file of a record in bytes."""


def tar_records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a shard in order; one is in memory at a time.

    Raises:
        DataError: it cannot be read, or has pictures; the file is named.
    """
    key, record = None, dict[str, Any]()
    try:
        with tarfile.open(file, "r|*") as opened:
            for member in opened:
                folder, _, name = member.name.rpartition("/")
                if member.isdir() or name.startswith("."):  # `._7.txt` may stand before `7.txt`
                    continue
                stem, _, kind = name.partition(".")
                if (folder, stem) != key and record:
                    yield record
                    record = {}
                key = (folder, stem)
                record |= _part(opened, member, kind.lower(), file)
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, ValueError) as error:
        raise DataError(
            "a shard cannot be read", given=f"{file}: {error}",
            expected="a tar file with KEY.json, KEY.txt or KEY.NAME.txt, in UTF-8",
        ) from error  # fmt: skip
    if record:
        yield record


def pictures_refused(given: str, *, shards: bool) -> DataError:
    """Return why pictures cannot be examples, and what trains on them."""
    corpus = "shards:GLOB@64" if shards else "folder:FOLDER@64"
    return DataError(
        "these examples are pictures; models that are fine-tuned by [tune] read text",
        given=given, expected="texts, prompts with answers, or chats",
        remedy=f'to classify pictures: corpus = "{corpus}" in [data] with name = "vit" or '
        '"resnet" in [model], and `atoll run`',
    )  # fmt: skip


def _part(
    opened: tarfile.TarFile, member: tarfile.TarInfo, kind: str, file: Path
) -> dict[str, Any]:
    """Return the columns that a file of a record holds."""
    name, _, suffix = kind.rpartition(".")
    place = f"{file.name}/{member.name}"
    if f".{suffix}" in PICTURES:
        raise pictures_refused(place, shards=True)
    if suffix not in ("json", "txt", "cls"):
        return {}
    inside = None if member.issparse() or member.size > _LONGEST else opened.extractfile(member)
    if inside is None:
        raise DataError(
            "a file of a shard cannot be read", given=f"{place}, {member.size} bytes",
            expected=f"a plain file of at most {_LONGEST} bytes",
        )  # fmt: skip
    text = inside.read().decode("utf-8")
    if suffix == "txt":
        return {name or "text": text}
    if suffix == "cls":
        return {"label": int(text)}
    found = json.loads(text)
    if name or not isinstance(found, dict):
        return {name or "json": found}
    return found
