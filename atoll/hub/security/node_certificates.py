"""Certificates of nodes: signed at join, renewed before expiry, refused once revoked."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from atoll.clock import Clock
from atoll.errors import AuthError, ConfigError, Revoked
from atoll.hub.db.database import Database
from atoll.hub.security.auth import Identity
from atoll.hub.security.certificates import Authority
from atoll.hub.security.connection_limits import ConnectionSlot

SCHEMA = """
CREATE TABLE IF NOT EXISTS auth_certificates (
    serial TEXT PRIMARY KEY, node TEXT NOT NULL, expires REAL NOT NULL, revoked REAL
);
"""


class NodeCertificates:
    """Issues and checks node certificates; revoked serials are cached in memory."""

    def __init__(
        self, authority: Callable[[], Authority] | None, *, database: Database, clock: Clock
    ) -> None:
        """Sign with the present authority; None: this hub does not terminate TLS itself."""
        self._authority = authority
        self._database = database
        self._clock = clock
        self._revoked: set[str] = set(
            database.read_now(lambda connection: [
                serial for (serial,) in connection.execute(
                    "SELECT serial FROM auth_certificates WHERE revoked IS NOT NULL"
                )
            ])
        )  # fmt: skip

    @property
    def needed(self) -> bool:
        """Whether nodes must present certificates."""
        return self._authority is not None

    def check_request(self, request_pem: str, scope: Mapping[str, Any]) -> None:
        """Raise ConfigError, before the ticket is used, if a join lacks a signing request."""
        if self._authority is not None and _is_direct(scope) and not request_pem:
            raise ConfigError(
                "this hub requires a signing request from each node",
                given="a join without a signing request",
                remedy="use the whole ticket, including the part after ~, and this version",
            )

    async def issue(self, request_pem: str, *, node: str) -> str:
        """Return a certificate in PEM; empty if none is needed. Raises ConfigError."""
        authority = self._authority
        if authority is None or not request_pem:
            return ""
        signed = await asyncio.to_thread(authority().sign_node, request_pem, node=node)
        now = self._clock.wall()

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM auth_certificates WHERE expires < ?", (now,))
            connection.execute(
                "INSERT INTO auth_certificates VALUES (?, ?, ?, NULL)",
                (signed.serial, node, signed.expires),
            )

        await self._database.write(write)
        return signed.pem

    async def revoke(self, node: str) -> bool:
        """Revoke every certificate of a node; return whether one was valid until now."""
        now = self._clock.wall()

        def write(connection: sqlite3.Connection) -> tuple[list[str], bool]:
            changed = connection.execute(
                "UPDATE auth_certificates SET revoked = ? WHERE node = ? AND revoked IS NULL",
                (now, node),
            ).rowcount
            rows = connection.execute(
                "SELECT serial FROM auth_certificates WHERE node = ?", (node,)
            )
            return [serial for (serial,) in rows], changed > 0

        serials, changed = await self._database.write(write)
        self._revoked.update(serials)
        return changed

    def check(self, identity: Identity, scope: Mapping[str, Any]) -> None:
        """Check that a node connected by TLS presents its own certificate.

        Raises:
            AuthError: it presents none, or that of another node.
            Revoked: an operator has revoked it.
        """
        if identity.role != "node" or self._authority is None or not _is_direct(scope):
            return
        slot: ConnectionSlot = scope["state"]["connection_slot"]
        shown = slot.certificate
        if shown is not None and shown.serial in self._revoked:
            raise Revoked("an operator of the hub has revoked this certificate", given=shown.serial)
        if shown is None or shown.name != identity.name:
            raise AuthError(
                "a node has to show its own certificate",
                given=f"the certificate of {shown.name}" if shown else "none",
                expected=f"the certificate that {identity.name} got when it joined",
                remedy="join again with a fresh ticket",
            )


def _is_direct(scope: Mapping[str, Any]) -> bool:
    """Return whether TLS ends at this hub, not at a proxy in front of it."""
    state = scope.get("state") or {}
    slot = state.get("connection_slot")
    return slot is not None and slot.secure and not state.get("proxied")
