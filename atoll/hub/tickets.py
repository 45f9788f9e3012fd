"""The limited ticket of a hub: made once, the same after every restart with the same limit."""

from __future__ import annotations

import sqlite3
from typing import cast

from atoll.hub.stores import Stores

SCHEMA = "CREATE TABLE IF NOT EXISTS hub_tickets (uses INTEGER PRIMARY KEY, secret TEXT NOT NULL)"


async def hub_ticket(stores: Stores, *, uses: int) -> str:
    """Return the hub's ticket that may be used `uses` times in all."""

    def find(connection: sqlite3.Connection) -> tuple[str] | None:
        row = connection.execute("SELECT secret FROM hub_tickets WHERE uses = ?", (uses,))
        return cast("tuple[str] | None", row.fetchone())

    known = await stores.database.read(find)
    if known is not None:
        return known[0]
    secret = await stores.auth.create_ticket(uses=uses)

    def keep(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO hub_tickets VALUES (?, ?)", (uses, secret))

    await stores.database.write(keep)
    return secret
