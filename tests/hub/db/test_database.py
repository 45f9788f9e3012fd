"""The database: durable before it answers, many writes per commit, clear when the disk is bad."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from atoll.errors import HubError, StorageFull
from atoll.hub.db.database import Database
from atoll.hub.db.opening import SCHEMA_VERSION
from tests.patience import PATIENCE_S

SCHEMA = "CREATE TABLE IF NOT EXISTS things (name TEXT PRIMARY KEY, data BLOB)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "hub.sqlite"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    opened = Database(path, schemas=[SCHEMA])
    yield opened
    opened.close()


def insert(connection: sqlite3.Connection, name: str, data: bytes = b"") -> None:
    connection.execute("INSERT INTO things VALUES (?, ?)", (name, data))


def inserting(name: str) -> Callable[[sqlite3.Connection], None]:
    return lambda connection: insert(connection, name)


def names(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM things ORDER BY name")]


def test_a_finished_write_is_seen_by_reads_and_by_other_programs(
    database: Database, path: Path
) -> None:
    async def work() -> None:
        await database.write(lambda c: insert(c, "a"))
        assert await database.read(names) == ["a"]

    asyncio.run(work())
    with sqlite3.connect(path) as other:
        assert names(other) == ["a"]
    other.close()


def test_writes_that_wait_share_one_commit(database: Database) -> None:
    held, free = threading.Event(), threading.Event()
    commits = 0

    def count(text: str) -> None:
        nonlocal commits
        commits += text == "COMMIT"

    def hold(connection: sqlite3.Connection) -> None:
        connection.set_trace_callback(count)
        held.set()
        assert free.wait(PATIENCE_S)

    async def work() -> None:
        first = asyncio.ensure_future(database.write(hold))
        await asyncio.to_thread(held.wait, 10)
        others = [asyncio.ensure_future(database.write(inserting(f"{n:03}"))) for n in range(100)]
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(first, *others)
        assert len(await database.read(names)) == 100

    asyncio.run(work())
    assert commits == 2


def test_a_write_that_fails_takes_nothing_of_the_others_with_it(database: Database) -> None:
    def half(connection: sqlite3.Connection) -> None:
        insert(connection, "half")
        raise ValueError("no")

    async def work() -> None:
        outcomes = await asyncio.gather(
            database.write(lambda c: insert(c, "a")),
            database.write(half),
            database.write(lambda c: insert(c, "a")),
            database.write(lambda c: insert(c, "b")),
            return_exceptions=True,
        )
        assert [type(outcome).__name__ for outcome in outcomes] == [
            "NoneType",
            "ValueError",
            "IntegrityError",
            "NoneType",
        ]
        assert await database.read(names) == ["a", "b"]

    asyncio.run(work())


def test_writes_happen_in_the_order_of_the_calls(database: Database) -> None:
    seen: list[int] = []

    def noting(number: int) -> Callable[[sqlite3.Connection], None]:
        return lambda _: seen.append(number)

    async def work() -> None:
        await asyncio.gather(*(database.write(noting(n)) for n in range(500)))

    asyncio.run(work())
    assert seen == list(range(500))


def test_readers_cannot_write(database: Database) -> None:
    with pytest.raises(HubError, match="readonly"):
        database.read_now(lambda c: insert(c, "a"))


def test_close_finishes_what_was_asked_for_and_refuses_the_rest(
    database: Database, path: Path
) -> None:
    async def work() -> None:
        writes = [asyncio.ensure_future(database.write(inserting(str(n)))) for n in range(50)]
        await asyncio.sleep(0)
        await asyncio.to_thread(database.close)
        await asyncio.gather(*writes)
        with pytest.raises(HubError, match="closed"):
            await database.write(lambda c: insert(c, "late"))

    asyncio.run(work())
    database.close()
    again = Database(path, schemas=[SCHEMA])
    assert len(again.read_now(names)) == 50
    again.close()


def test_a_cancelled_wait_does_not_disturb_the_writer(database: Database) -> None:
    async def work() -> None:
        write = asyncio.ensure_future(database.write(lambda c: insert(c, "a")))
        await asyncio.sleep(0)
        write.cancel()
        await database.write(lambda c: insert(c, "b"))
        assert await database.read(names) == ["a", "b"]

    asyncio.run(work())


def test_a_full_disk_is_reported_and_old_data_stay(database: Database) -> None:
    def shrink(connection: sqlite3.Connection) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + 2}")

    database.write_now(lambda c: insert(c, "before"))
    database.write_now(shrink)
    with pytest.raises(StorageFull, match="free some space"):
        database.write_now(lambda c: insert(c, "large", bytes(1_000_000)))
    assert database.read_now(names) == ["before"]
    database.write_now(lambda c: c.execute("PRAGMA max_page_count=1000000"))
    database.write_now(lambda c: insert(c, "large", bytes(1_000_000)))
    assert database.read_now(names) == ["before", "large"]


def test_a_second_hub_on_the_same_folder_is_refused(
    database: Database, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.db.opening._LOCK_WAIT_S", 0.05)
    with pytest.raises(HubError, match="another hub uses this data folder"):
        Database(path, schemas=[SCHEMA])
    database.write_now(lambda c: insert(c, "still works"))


@pytest.mark.parametrize("damage", ["not a database", "torn page"])
def test_a_damaged_file_is_named_and_left_alone(path: Path, damage: str) -> None:
    first = Database(path, schemas=[SCHEMA])
    for n in range(200):
        first.write_now(inserting(f"{n:04}" + "x" * 400))
    first.close()
    content = bytearray(path.read_bytes())
    if damage == "not a database":
        content[:16] = b"x" * 16
    else:
        content[8192 : 8192 + 4096] = b"\xff" * 4096
    path.write_bytes(content)
    with pytest.raises(HubError, match=r"damaged.*hub\.sqlite.*move it away"):
        Database(path, schemas=[SCHEMA])
    assert path.read_bytes() == content


def test_a_file_of_a_newer_version_is_refused(path: Path) -> None:
    first = Database(path, schemas=[SCHEMA])
    first.write_now(lambda c: c.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}"))
    first.close()
    with pytest.raises(HubError, match="newer Atoll"):
        Database(path)


def test_all_tables_are_made_in_one_transaction(path: Path) -> None:
    made = "CREATE TABLE IF NOT EXISTS made (x)"
    with pytest.raises(HubError):
        Database(path, schemas=[made, "CREATE TABLE (oops)"])
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT name FROM sqlite_master").fetchall() == []
    raw.close()
    Database(path, schemas=[made]).close()


def test_neighbours_of_one_function_become_one_call(database: Database) -> None:
    calls: list[list[str]] = []

    def insert_all(connection: sqlite3.Connection, given: Sequence[str]) -> list[int]:
        calls.append(list(given))
        for name in given:
            insert(connection, name)
        return [len(name) for name in given]

    async def work() -> None:
        writes = [database.write_each(insert_all, name, str) for name in ("a", "bb", "ccc")]
        between = asyncio.ensure_future(database.write(inserting("d")))
        await asyncio.sleep(0)
        last = database.write_each(insert_all, "eeee", str)
        assert await asyncio.gather(*writes, last) == ["1", "2", "3", "4"]
        await between
        assert await database.read(names) == ["a", "bb", "ccc", "d", "eeee"]

    asyncio.run(work())
    assert calls == [["a", "bb", "ccc"], ["eeee"]]


def test_one_of_many_neighbours_fails_alone(database: Database) -> None:
    def insert_all(connection: sqlite3.Connection, given: Sequence[str]) -> list[str]:
        for name in given:
            insert(connection, name)
        return list(given)

    async def work() -> None:
        writes = [database.write_each(insert_all, name, str.upper) for name in "abac"]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert [str(one) if isinstance(one, str) else type(one).__name__ for one in outcomes] == [
            *("A", "B", "IntegrityError", "C")
        ]
        assert await database.read(names) == ["a", "b", "c"]

    asyncio.run(work())


def test_a_commit_is_noted_even_if_its_caller_is_gone(database: Database) -> None:
    noted: list[str] = []

    async def work() -> None:
        gone = database.write_later(lambda c: insert(c, "a"), lambda _: noted.append("a"))
        gone.cancel()
        await database.write(inserting("b"))

    asyncio.run(work())
    assert noted == ["a"]
    assert database.read_now(names) == ["a", "b"]


def test_a_failing_callback_stops_no_other_write(database: Database) -> None:
    def fails(_: object) -> None:
        raise KeyError("gone")

    async def work() -> None:
        first = database.write_later(inserting("a"), fails)
        second = database.write_later(inserting("b"), lambda _: "noted")
        async with asyncio.timeout(PATIENCE_S):
            found = await asyncio.gather(first, second, return_exceptions=True)
            await database.write(inserting("c"))
        assert [type(one) for one in found] == [KeyError, str]

    asyncio.run(work())
    assert database.read_now(names) == ["a", "b", "c"]


def test_a_lock_that_cannot_be_opened_is_explained(path: Path) -> None:
    path.with_name(path.name + ".lock").mkdir(parents=True)
    with pytest.raises(HubError, match="database failed"):
        Database(path)


def test_a_second_event_loop_goes_on_where_the_first_was_left(database: Database) -> None:
    async def leave() -> None:
        database.write_later(inserting("a"), lambda value: value)

    asyncio.run(leave())
    asyncio.run(database.write(inserting("b")))
    assert database.read_now(names) == ["a", "b"]
