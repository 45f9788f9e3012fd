"""Records of nodes: what memory says is what the disk has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.errors import HubError
from atoll.hub.db.database import Database
from atoll.hub.nodes.store import SCHEMA, NodeRecord, NodeStore


def test_a_record_that_was_not_written_is_not_remembered(tmp_path: Path) -> None:
    """Else an agent that was restarted then would be taken for its predecessor."""
    database = Database(tmp_path / "hub.sqlite", schemas=[SCHEMA])
    store, first = NodeStore(database), NodeRecord("first")
    asyncio.run(store.put("box", first))
    database.close()
    with pytest.raises(HubError):
        asyncio.run(store.put("box", NodeRecord("second")))
    assert store.get("box") == first
