"""Admission and revocation of machines and people: tokens, certificates and sessions together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.errors import unknown
from atoll.hub.nodes.token_meters import TokenMeters
from atoll.hub.security.auth import LOGINS, Identity
from atoll.hub.security.connection_limits import ConnectionLimiter, ConnectionSlot
from atoll.hub.security.node_certificates import NodeCertificates
from atoll.hub.security.tls import TlsFiles
from atoll.hub.sessions.session import Sessions
from atoll.hub.stores import Stores
from atoll.ids import session_id
from atoll.wire.states import JobState


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a machine or a person receives for a ticket."""

    name: str
    token: str
    role: str
    certificate: str = ""
    """PEM; empty where none is needed."""


class Access:
    """Admission by ticket, and its revocation."""

    def __init__(
        self,
        *,
        stores: Stores,
        sessions: Sessions,
        certificates: NodeCertificates,
        limiter: ConnectionLimiter,
        tls: TlsFiles | None,
        meters: TokenMeters,
    ) -> None:
        """Serve a hub with these certificates; None: it does not terminate TLS itself."""
        self.meters = meters
        self._stores = stores
        self._sessions = sessions
        self._limiter = limiter
        self.certificates = certificates
        self.tls = tls

    async def join(
        self, secret: str, *, name: str, request: str, source: str, scope: Mapping[str, Any]
    ) -> Admitted:
        """Admit a machine.

        Raises:
            AuthError: the ticket is wrong, or not for a machine.
            ConfigError: the name or the signing request is wrong.
        """
        self.certificates.check_request(request, scope)
        node, token = await self._stores.auth.redeem(secret, name=name, source=source)
        self._stores.ledger.renew("node", node)
        try:
            certificate = await self.certificates.issue(request, node=node)
        except BaseException:
            await self._stores.auth.revoke_node(node, tell=False)  # the join failed
            raise
        return Admitted(node, token, "node", certificate)

    async def log_in(self, secret: str, *, name: str, source: str) -> Admitted:
        """Admit a person or a program; raises as `join` does."""
        auth = self._stores.auth
        login, token = await auth.redeem(secret, name=name, source=source, roles=LOGINS)
        role = auth.authenticate(token).role
        self._stores.ledger.renew(role, login)
        return Admitted(login, token, role)

    async def shut_out(self, node: str) -> list[str]:
        """Revoke a node's token and certificate, close its session, and stop what runs on it.

        Returns:
            Ids of the tickets it joined with that are still valid.

        Raises:
            ConfigError: no node of this name has joined.
        """
        auth = self._stores.auth
        tickets = await auth.tickets_of(node)
        known = node in auth.names("node")
        if known:
            try:
                await auth.revoke_node(node)
            finally:  # also when the database fails: the token is forgotten in memory
                await self._end_sessions(node)
        # Last, so that a failure leaves no session open; a second try then finds only these.
        if not await self.certificates.revoke(node) and not known:
            raise unknown("node", node, auth.names("node"))
        return tickets

    async def _end_sessions(self, node: str) -> None:
        """Close the sessions of a node and its processes, whose tokens are revoked too."""
        self._sessions.end(node)
        self._limiter.cut("node", node)
        processes = [
            self._end_process(job.job, process.member)
            for job in self._stores.jobs.list()
            if job.state == JobState.RUNNING
            for process in job.processes
            if process.node == node and process.live
        ]
        await asyncio.gather(*processes)

    async def _end_process(self, job: str, member: str) -> None:
        try:
            await self._stores.auth.revoke_member(job, member)
        finally:
            self._sessions.end(session_id(job, member))
            self._limiter.cut("job", job, member)

    async def revoke_ticket(self, id: str) -> list[str]:
        """Revoke a ticket and the logins made with it; return their names.

        Raises:
            ConfigError: there is no such ticket.
        """
        people = await self._stores.auth.revoke_ticket(id)
        for name in people:
            for role in LOGINS:
                self._limiter.cut(role, name)
        return people

    async def log_out(self, identity: Identity) -> bool:
        """End a login; False if the token is not that of one."""
        return await self._stores.auth.log_out(identity)

    def admit(self, identity: Identity, scope: Mapping[str, Any]) -> None:
        """Accept a connection for the identity of its token.

        Raises:
            AuthError: it is a node's, and shows no certificate of that node.
            LimitReached: its token has too many connections.
        """
        self.certificates.check(identity, scope)
        slot: ConnectionSlot | None = (scope.get("state") or {}).get("connection_slot")
        if slot is not None:
            slot.authenticated(identity)
