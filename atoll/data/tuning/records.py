"""Records of files: JSON lines, JSON, Parquet, CSV, tar shards and plain text, one at a time.

A record is a mapping of a file's column names to values, or `{"text": ...}` for a text file. Tables
and texts may be compressed: `.jsonl.gz`.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from atoll.data.tuning.tar_records import PICTURES, TARS, pictures_refused, tar_records
from atoll.errors import ConfigError, DataError
from atoll.model_hub import PREFIX, find_here

Record = Mapping[str, Any]

_LONGEST_FIELD = 1 << 27
"""Largest CSV field in bytes; Python's default, 128 KiB, is less than a long chat."""


def find_files(patterns: Sequence[str]) -> list[list[Path]]:
    """Return the files of each pattern, sorted by name.

    Args:
        patterns: Names and globs (`~` is expanded), and data sets of a model hub, as for
            :func:`~atoll.model_hub.find_here`.

    Raises:
        ConfigError: a data set of a hub is named otherwise.
        DataError: a pattern matches no file, or a file of an unknown kind; or a hub does not give
            what is named.
    """
    found = []
    for pattern in patterns:
        files = find_here(pattern)
        if not files:
            raise _no_file(pattern)
        for file in files:
            _reader(file)
        found.append(files)
    return found


def _no_file(pattern: str) -> DataError:
    """Return why an entry names no file of examples."""
    kind, _, argument = pattern.partition(":")
    if kind in ("folder", "shards") and argument:
        return pictures_refused(pattern, shards=kind == "shards")
    folder = Path(pattern).expanduser()
    inside = sorted(one for one in folder.rglob("*") if one.is_file()) if folder.is_dir() else []
    if any(one.suffix.lower() in PICTURES for one in inside):
        return pictures_refused(f"the folder {pattern}", shards=False)
    some = next((one for one in inside if kind_of(one)), None)
    remedy = f"{pattern.rstrip('/')}/**/*{kind_of(some)}" if some else (
        f"check the name; relative ones start at {Path.cwd()}" + _if_named(pattern)
    )  # fmt: skip
    return DataError(
        "no file matches the data", given=f"the folder {pattern}" if inside else pattern,
        expected="files of " + ", ".join(KINDS), remedy=remedy,
    )  # fmt: skip


def _if_named(pattern: str) -> str:
    """Return what to do with the name of a data set at a hub; empty: it looks like none."""
    owner, slash, name = pattern.partition("/")
    if not (owner and slash and name) or any(one in pattern for one in "*.~") or "/" in name:
        return ""
    return f"; a data set of a model hub: {PREFIX}{pattern}"


def read_records(file: Path) -> Iterator[Record]:
    """Yield the records of a file in order; one is in memory at a time, except of `.json`.

    Raises:
        ConfigError: a library is missing.
        DataError: the file, or a line of it, cannot be read; both are named.
    """
    try:
        yield from _reader(file)(file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            "a file of the data cannot be read", given=f"{file}: {error}",
            expected="a readable file in UTF-8",
        ) from error  # fmt: skip


def _json_lines(file: Path) -> Iterator[Record]:
    with _opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _record(_parsed(line, file, number), file, number)


def _json(file: Path) -> Iterator[Record]:
    with _opened(file) as whole:
        rows = _parsed(whole.read(), file, 1)
    if not isinstance(rows, list):
        raise _wrong(file, 1, type(rows).__name__, "a list of objects")
    for number, row in enumerate(rows, start=1):
        yield _record(row, file, number)


def _csv(file: Path) -> Iterator[Record]:
    csv.field_size_limit(_LONGEST_FIELD)
    with _opened(file, encoding="utf-8-sig", newline="") as rows:
        for number, row in enumerate(csv.DictReader(rows), start=1):
            if None in row:  # more fields than the header names
                raise _wrong(file, number, f"{len(row[None])} more fields", "those of the header")
            yield row


def _parquet(file: Path) -> Iterator[Record]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(
            "reading Parquet needs a library that is not installed", given=str(error),
            expected="pyarrow", remedy="pip install 'atoll[tune]'",
        ) from error  # fmt: skip
    try:
        with ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise _wrong(file, 1, str(error)[:100], "Parquet") from error


def _text(file: Path) -> Iterator[Record]:
    with _opened(file) as whole:
        yield {"text": whole.read()}


def _opened(file: Path, *, encoding: str = "utf-8", newline: str | None = None) -> TextIO:
    """Open a text file, which may be compressed."""
    if file.suffix.lower() == ".gz":
        return gzip.open(file, "rt", encoding=encoding, newline=newline)
    return file.open(encoding=encoding, newline=newline)


def _parsed(text: str, file: Path, number: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _wrong(file, number, f"{text[:60]!r}: {error}", "JSON") from error


def _record(value: Any, file: Path, number: int) -> Record:
    if not isinstance(value, dict):
        raise _wrong(file, number, type(value).__name__, 'an object, e.g. {"messages": [...]}')
    return value


def _wrong(file: Path, number: int, given: str, expected: str) -> DataError:
    return DataError(
        "a record of the data cannot be read", given=f"{file}, record {number}: {given}",
        expected=expected,
    )  # fmt: skip


_PLAIN: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".txt": _text, ".md": _text,
}  # fmt: skip
KINDS: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    **_PLAIN, ".parquet": _parquet, **dict.fromkeys(TARS, tar_records),
    **{f"{suffix}.gz": reader for suffix, reader in _PLAIN.items()},
}  # fmt: skip
"""End of a file's name -> its reader."""


def kind_of(file: Path) -> str:
    """Return the end of a file's name that says its kind; empty: it holds no examples."""
    two = "".join(file.suffixes[-2:]).lower()
    return two if two in KINDS else file.suffix.lower() if file.suffix.lower() in KINDS else ""


def _reader(file: Path) -> Callable[[Path], Iterator[Record]]:
    if file.suffix.lower() in PICTURES:
        raise pictures_refused(str(file), shards=False)
    kind = kind_of(file)
    if not kind:
        raise DataError(
            "this kind of file holds no examples", given=str(file),
            expected="one of " + ", ".join(KINDS),
        )  # fmt: skip
    return KINDS[kind]
