"""Output of workers: each line once, bounded, followed live."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.clock import VirtualClock
from atoll.hub.observability.logs import Logs
from atoll.hub.stores import Stores
from atoll.wire.limits import MAX_LOG_LINE
from tests.hub.durable import with_stores


def texts(lines: list[dict[str, object]]) -> list[object]:
    return [line["text"] for line in lines]


def test_lines_sent_again_are_stored_once_even_over_a_restart(tmp_path: Path) -> None:
    async def first(stores: Stores) -> None:
        assert await stores.logs.add("j", "w0", source="s", seq=1, lines=["a", "b"]) == 2

    async def second(stores: Stores) -> None:
        assert await stores.logs.add("j", "w0", source="s", seq=1, lines=["a", "b"]) == 2
        assert await stores.logs.add("j", "w0", source="s", seq=2, lines=["b", "c"]) == 3
        assert await stores.logs.add("j", "w1", source="s", seq=1, lines=["other member"]) == 1
        assert await stores.logs.add("j", "w0", source="t", seq=1, lines=["other agent"]) == 1
        assert texts(await stores.logs.read("j")) == ["a", "b", "c", "other member", "other agent"]
        assert texts(await stores.logs.read("j", member="w1")) == ["other member"]
        assert texts(await stores.logs.tail("j", limit=2)) == ["other member", "other agent"]

    with_stores(tmp_path, first)
    with_stores(tmp_path, second)


def test_a_job_keeps_its_last_lines_only(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        logs = Logs(stores.database, clock=VirtualClock(), max_lines=100)
        await stores.logs.add("other", "w0", source="s", seq=1, lines=["stays"])
        for start in range(0, 2000, 500):
            lines = [str(n) for n in range(start, start + 500)]
            await logs.add("j", "w0", source="s", seq=start + 1, lines=lines)
        assert texts(await logs.read("j", limit=5000)) == [str(n) for n in range(1900, 2000)]
        assert texts(await logs.read("other")) == ["stays"]

    with_stores(tmp_path, test)


def test_a_long_line_is_cut(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        await stores.logs.add("j", "w0", source="s", seq=1, lines=["x" * 100_000])
        (line,) = await stores.logs.read("j")
        assert len(line["text"]) == MAX_LOG_LINE

    with_stores(tmp_path, test)


def test_a_follower_gets_a_line_as_soon_as_it_is_stored(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        following = [
            asyncio.ensure_future(stores.logs.read("j", after=0, wait_s=10.0)) for _ in range(3)
        ]
        await asyncio.sleep(0)
        await stores.logs.add("unrelated", "w0", source="s", seq=1, lines=["no"])
        await stores.logs.add("j", "w0", source="s", seq=1, lines=["now"])
        for lines in await asyncio.gather(*following):
            assert texts(lines) == ["now"]
        assert await stores.logs.read("j", after=1_000, wait_s=0.01) == []

    with_stores(tmp_path, test)


def test_log_search_ignores_case_and_wildcards(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        lines = ["Loss 1.5", "100% done", "100 done", "a_b", "axb", "back\\slash", "LOSS 1.4"]
        await stores.logs.add("j", "w0", source="s", seq=1, lines=lines)
        await stores.logs.add("j", "w1", source="s", seq=1, lines=["loss 9"])

        async def found(search: str, member: str = "") -> list[str]:
            rows = await stores.logs.tail("j", search=search, member=member, limit=50)
            return [row["text"] for row in rows]

        assert await found("loss") == ["Loss 1.5", "LOSS 1.4", "loss 9"]
        assert await found("loss", "w0") == ["Loss 1.5", "LOSS 1.4"]
        assert await found("0% d") == ["100% done"]
        assert await found("a_b") == ["a_b"]
        assert await found("k\\s") == ["back\\slash"]
        assert await found("nothing") == []
        later = await stores.logs.read("j", search="loss", after=1)
        assert [row["text"] for row in later] == ["LOSS 1.4", "loss 9"]

    with_stores(tmp_path, test)


def test_who_has_everything_does_not_ask_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(stores: Stores) -> None:
        await stores.logs.add("j", "w0", source="s", seq=1, lines=["one"])
        (line,) = await stores.logs.read("j")
        looks = []
        read = stores.database.read

        async def counted(fn: Callable[[sqlite3.Connection], Any]) -> Any:
            looks.append(fn)
            return await read(fn)

        monkeypatch.setattr(stores.database, "read", counted)
        assert await stores.logs.read("j", after=line["id"]) == []
        assert looks == []
        assert await stores.logs.read("other") == await stores.logs.read("other") == []
        assert len(looks) == 1  # the second time it is known that there is nothing
        await stores.logs.add("j", "w0", source="s", seq=2, lines=["two"])
        (line,) = await stores.logs.read("j", after=line["id"])
        assert line["text"] == "two"

    with_stores(tmp_path, test)


def test_searches_do_not_keep_others_waiting(tmp_path: Path) -> None:
    """One viewer may ask for many at once, each of which looks at every line."""

    async def test(stores: Stores) -> None:
        await stores.logs.add("j", "w0", source="s", seq=1, lines=["x" * 1_000] * 500)
        searches = [
            asyncio.create_task(stores.logs.tail("j", search=f"no such line {n}"))
            for n in range(300)
        ]
        await asyncio.sleep(0)
        assert len(await stores.logs.tail("j", limit=2)) == 2
        assert not all(search.done() for search in searches)
        assert await asyncio.gather(*searches) == [[]] * 300

    with_stores(tmp_path, test)
