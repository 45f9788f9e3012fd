"""Output of a process: split into lines, passed on, and kept in a file of bounded size."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from atoll.config.redaction import Redaction
from atoll.node.processes.files import open_to_append
from atoll.wire.limits import MAX_LOG_LINE

log = logging.getLogger(__name__)

TAIL_LINES = 40
"""Last lines kept for the report of a failure."""

MAX_OUTPUT_BYTES = 64 * 2**20
"""Size at which the output file is rotated, with one old file kept."""

LineHandler = Callable[[str], None]


class Readable(Protocol):
    """The reading end of a pipe."""

    def read1(self, size: int = -1, /) -> bytes:
        """Return what is available, waiting for the first byte; empty at the end."""
        ...


def read_output(
    stream: Readable, path: Path, on_line: LineHandler, tail: deque[str], *, hide: Redaction
) -> None:
    """Pass on a process's output until the pipe is closed.

    Every line goes to `tail` and to `on_line`, on the calling thread; all bytes go to the file.
    What `hide` hides goes nowhere; the file then gets whole lines.
    """
    with OutputFile(path) as output:
        for line in read_lines(stream, on_block=_drop if hide else output.write):
            whole = hide(line.decode("utf-8", "replace"))
            if hide:
                output.write(f"{whole}\n".encode())
            text = whole[:MAX_LOG_LINE]
            tail.append(text)
            on_line(text)


def _drop(block: bytes) -> None:
    """Write no raw bytes."""


def read_lines(stream: Readable, *, on_block: Callable[[bytes], None] = _drop) -> Iterator[bytes]:
    """Yield the lines of a process's output, until the pipe is closed.

    A carriage return also ends a line, or a progress bar would be one endless line. `on_block` gets
    the raw bytes.
    """
    rest, last = b"", b""
    while block := stream.read1(65536):
        on_block(block)
        if last == b"\r":
            block = block.removeprefix(b"\n")  # the rest of a line end
        last = block[-1:]
        *lines, rest = (rest + block).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(rest) > 4 * MAX_LOG_LINE:  # bounds the memory of an endless line
            lines, rest = [*lines, rest], b""
        yield from lines
    if rest:
        yield rest


class OutputFile:
    """The file with a process's output, rotated when it grows too large."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> OutputFile:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        try:
            self._file = open_to_append(self._path)
        except OSError as error:
            log.warning("the output is not kept in a file: %s", error)
            self._file = None

    def write(self, block: bytes) -> None:
        """Append a block; if the disk is full, only this copy is lost."""
        if self._file is None:
            return
        try:
            self._file.write(block)
            if self._file.tell() > MAX_OUTPUT_BYTES:
                self._file.close()
                self._path.replace(self._path.with_suffix(".log.1"))
                self._open()
        except OSError as error:
            log.warning("the output is no longer kept in a file: %s", error)
            self._file.close()
            self._file = None
