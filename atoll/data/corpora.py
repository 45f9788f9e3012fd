"""Texts to train on: Python's own standard library, or files that a person names.

The standard library is the default because every machine that can run Atoll already has several
megabytes of it: real text, several domains, nothing to download. Members must run the same Python
version to see the same text; :attr:`atoll.data.Dataset.digest` tells when they do not.
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
"""Specs of text corpora."""

IMAGE_CORPORA = ("fashion-mnist", "idx:FOLDER", "segments")
"""Specs of image sets; see `atoll.data.images`."""

_SKIPPED_FOLDERS = frozenset(
    # Packages installed later differ between machines.
    {"site-packages", "dist-packages", "__pycache__"}
    # Tests repeat themselves and are left out by many distributions.
    | {"test", "tests", "idle_test"}
    # Generated tables, not text: they would teach lists of numbers.
    | {"encodings", "pydoc_data"}
)

# How this very interpreter was built, with its paths: no two machines agree on it.
_BUILD_RECORDS = ("config-", "_sysconfigdata")


@dataclass(frozen=True, slots=True)
class Document:
    """One text.

    Attributes:
        name: Its path, with forward slashes.
        domain: What it is about: the top package, or the folder, or ``"modules"``.
        data: Its bytes, as they are on disk; any encoding.
    """

    name: str
    domain: str
    data: bytes


@dataclass(frozen=True)
class Corpus:
    """Documents in an order that depends on their names alone.

    Attributes:
        name: The spec it was loaded from.
        documents: At least one, not all empty.
    """

    name: str
    documents: tuple[Document, ...]

    @cached_property
    def text(self) -> bytes:
        """All documents, one after the other, with a line break between them."""
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
    """Return the corpus that ``spec`` names.

    Args:
        spec: ``"stdlib"``, or ``"files:"`` and a glob such as ``files:notes/**/*.txt`` (``**``
            reaches into folders below, ``~`` is the home folder).

    Raises:
        ConfigError: no corpus has this name; the nearest known one is given.
        DataError: nothing matches, everything is empty, or a file cannot be read.
    """
    kind, _, argument = spec.partition(":")
    if spec == "stdlib":
        return _checked(Corpus(spec, tuple(_standard_library())), spec)
    if kind == "files":
        return _checked(Corpus(spec, tuple(_matching(argument))), spec)
    # A person who writes `file:*.txt` meant `files:...`: compare names without the argument.
    known = [name.partition(":")[0] for name in (*CORPORA, *IMAGE_CORPORA)]
    raise unknown("corpus", kind if argument else spec, known)


def is_images(spec: str) -> bool:
    """Return whether a spec names images."""
    kinds = [name.partition(":")[0] for name in IMAGE_CORPORA]
    return spec.partition(":")[0] in kinds


def _standard_library() -> Iterator[Document]:
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
        yield Document(name.as_posix(), domain, _read(path))


def _matching(pattern: str) -> Iterator[Document]:
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
            yield Document(path.as_posix(), path.parent.name or ".", _read(path))


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


def _checked(corpus: Corpus, spec: str) -> Corpus:
    """Return the corpus, which must not be empty."""
    if any(document.data for document in corpus.documents):
        return corpus
    if spec == "stdlib":
        raise DataError(
            "this Python comes without the sources of its standard library",
            given=sysconfig.get_paths()["stdlib"],
            expected=".py files there",
            remedy="train on your own text: corpus = 'files:GLOB'",
        )
    count = len(corpus.documents)
    raise DataError(
        "no file matches the corpus" if count == 0 else "the corpus is empty",
        given=spec if count == 0 else f"{spec} ({count} files, 0 bytes)",
        expected="at least one file with text",
        remedy=f"check the glob; relative ones start at {Path.cwd()}",
    )
