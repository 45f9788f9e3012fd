"""What a reducer's process prints is in the job's log, line by line."""

from __future__ import annotations

import asyncio
from itertools import chain

import pytest

from atoll.hub.scheduler.reducer_clients import LINES_AT_ONCE, READ_BYTES, output_lines


def lines_of(*pieces: bytes) -> list[list[str]]:
    """Return what comes of a process's output, which arrives in these pieces."""

    async def read() -> list[list[str]]:
        output = asyncio.StreamReader()

        async def write() -> None:
            for piece in pieces:
                output.feed_data(piece)
                await asyncio.sleep(0)
            output.feed_eof()

        writing = asyncio.create_task(write())
        found = [lines async for lines in output_lines(output)]
        await writing
        return found

    return asyncio.run(read())


def test_lines_and_letters_are_whole_where_reads_are_not() -> None:
    whole = "ready\r\nfünf\n".encode()
    pieces = [whole[at : at + 1] for at in range(len(whole))]
    assert list(chain(*lines_of(*pieces, b"the end"))) == ["ready", "fünf", "the end"]


def test_many_lines_at_once_are_all_kept() -> None:
    found = lines_of(b"x\n" * (2 * LINES_AT_ONCE + 1))
    assert [len(lines) for lines in found] == [LINES_AT_ONCE, LINES_AT_ONCE, 1]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_endless_lines_are_cut(end: bytes) -> None:
    found = list(chain(*lines_of(b"x" * (3 * READ_BYTES) + end)))
    assert "".join(found) == "x" * (3 * READ_BYTES)
    assert max(map(len, found)) < 2 * READ_BYTES
