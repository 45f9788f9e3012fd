"""Secrets of users that are removed while they are read."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from atoll.clock import VirtualClock
from atoll.errors import ConfigError
from atoll.hub.db.database import Database
from atoll.hub.security.secrets import SCHEMA, Secrets

T = TypeVar("T")


def test_a_secret_removed_while_it_is_read_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path / "hub.sqlite", schemas=[SCHEMA])
    secrets = Secrets(database, folder=tmp_path, clock=VirtualClock())

    async def read_while_removed() -> None:
        await secrets.set("KEY", "value-of-key", by="ann")
        assert await secrets.values(["KEY"]) == {"KEY": "value-of-key"}
        read = database.read

        async def remove_after(fn: Callable[[sqlite3.Connection], T]) -> T:
            found = await read(fn)
            await database.write(lambda connection: connection.execute("DELETE FROM secrets"))
            return found

        monkeypatch.setattr(database, "read", remove_after)
        assert await secrets.values(["KEY"]) == {"KEY": "value-of-key"}
        monkeypatch.undo()
        with pytest.raises(ConfigError, match="KEY"):
            await secrets.values(["KEY"])

    asyncio.run(read_while_removed())
    database.close()
