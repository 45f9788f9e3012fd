"""Text corpora: Python's standard library, or the user's files.

The standard library, the default, is several megabytes of real text on every machine. Members must
run the same Python version; :attr:`atoll.data.Dataset.digest` differs otherwise.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from atoll.errors import DataError, unknown

CORPORA = ("files:GLOB", "stdlib")

IMAGE_CORPORA = (
    "fashion-mnist", "folder:FOLDER", "idx:FOLDER", "segments", "shards:GLOB",
)  # fmt: skip
"""See `atoll.data.images` and `atoll.data.pictures`."""

_SKIPPED_FOLDERS = frozenset(
    # Installed packages differ between machines.
    {"site-packages", "dist-packages", "__pycache__"}
    # Repetitive, and omitted by many distributions.
    | {"test", "tests", "idle_test"}
    # Generated tables instead of text.
    | {"encodings", "pydoc_data"}
)

# Build records contain paths, which differ between machines.
_BUILD_RECORDS = ("config-", "_sysconfigdata")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a text of a corpus is; names and domains are those of :class:`Document`."""

    name: str
    domain: str
    path: Path


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus.

    Attributes:
        name: Path with forward slashes.
        domain: Top-level package, or folder, or ``"modules"``.
        data: Raw bytes in any encoding.
    """

    name: str
    domain: str
    data: bytes


@dataclass(frozen=True)
class Corpus:
    """Documents in an order that depends on their names only; at least one is not empty."""

    name: str
    documents: tuple[Document, ...]

    @cached_property
    def text(self) -> bytes:
        """All documents, joined by line breaks."""
        return b"\n".join(document.data for document in self.documents)

    @property
    def num_bytes(self) -> int:
        """Size of :attr:`text`."""
        return len(self.text)

    @property
    def domains(self) -> tuple[str, ...]:
        """The distinct domains, sorted."""
        return tuple(sorted({document.domain for document in self.documents}))


def load_corpus(spec: str) -> Corpus:
    """Load ``stdlib``, or ``files:GLOB`` such as ``files:notes/**/*.txt`` (``~`` is expanded).

    Raises:
        ConfigError: the name is unknown; suggests the nearest one.
        DataError: nothing matches, everything is empty, or a file cannot be read.
    """
    found = find_texts(spec)
    return Corpus(spec, tuple(Document(one.name, one.domain, _read(one.path)) for one in found))


def find_texts(spec: str) -> list[Source]:
    """Return the texts of a corpus in its order, unread; raises as :func:`load_corpus`."""
    kind, _, argument = spec.partition(":")
    if spec == "stdlib":
        return _checked(list(_standard_library()), spec)
    if kind == "files":
        return _checked(list(_matching(argument)), spec)
    # `file:*.txt` is probably meant to be `files:...`: compare names without the argument.
    known = [name.partition(":")[0] for name in (*CORPORA, *IMAGE_CORPORA)]
    raise unknown("corpus", kind if argument else spec, known)


def is_images(spec: str) -> bool:
    """Return whether a spec names images."""
    kinds = [name.partition(":")[0] for name in IMAGE_CORPORA]
    return spec.partition(":")[0] in kinds


def _standard_library() -> Iterator[Source]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED_FOLDERS]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if name.as_posix().startswith(_BUILD_RECORDS):
            continue
        domain = name.parts[0] if len(name.parts) > 1 else "modules"
        yield Source(name.as_posix(), domain, path)


def _matching(pattern: str) -> Iterator[Source]:
    if not pattern:
        raise DataError(
            "no files named",
            given="files:",
            expected="a glob after the colon",
            remedy="write for example files:notes/**/*.txt",
        )
    found = glob.glob(os.path.expanduser(pattern), recursive=True)
    for path in sorted((Path(name) for name in found), key=Path.as_posix):
        if path.is_file():
            yield Source(path.as_posix(), path.parent.name or ".", path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            "a file of the corpus cannot be read",
            given=str(path),
            expected=f"a readable file ({error.strerror})",
            remedy="change its permissions, or a glob that leaves it out",
        ) from error


def _checked(found: list[Source], spec: str) -> list[Source]:
    if any(one.path.stat().st_size for one in found):
        return found
    if spec == "stdlib":
        raise DataError(
            "this Python comes without the sources of its standard library",
            given=sysconfig.get_paths()["stdlib"],
            expected=".py files there",
            remedy="train on your own text: corpus = 'files:GLOB'",
        )
    count = len(found)
    raise DataError(
        "no file matches the corpus" if count == 0 else "the corpus is empty",
        given=spec if count == 0 else f"{spec} ({count} files, 0 bytes)",
        expected="at least one file with text",
        remedy=f"check the glob; relative ones start at {Path.cwd()}",
    )
