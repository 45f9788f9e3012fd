"""Calls of the hub's REST interface by which machines and people come and go."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from atoll.net.rest import Rest
from atoll.wire.messages import NodeInfo


class Joined(NamedTuple):
    """What a machine gets for a ticket."""

    node: str
    token: str
    certificate: str
    """PEM; empty where the hub asks for none."""


class Login(NamedTuple):
    """What a person gets for a ticket."""

    name: str
    role: str
    token: str


class AccessCalls:
    """The part of a client of the hub that is about who may do what."""

    _rest: Rest

    def join(self, secret: str, *, name: str, info: NodeInfo, request: str = "") -> Joined:
        """Trade the secret of a ticket for a node id and a node token.

        Args:
            secret: Of a ticket for nodes.
            name: Wished node id.
            info: What the machine is.
            request: PEM signing request for its own key, where the hub speaks TLS.

        Raises:
            AuthError: the ticket is unknown, expired, used up or not for a node.
        """
        known = msgspec.to_builtins(info)
        body = {"secret": secret, "name": name, "info": known, "request": request}
        answer = self._rest.json("POST", "/api/join", json=body)
        return Joined(answer["node"], answer["token"], answer.get("certificate", ""))

    def renew(self, request: str) -> str:
        """Return a new certificate (PEM) for the node whose token and certificate this shows."""
        return str(self._rest.json("POST", "/api/renew", json={"request": request})["certificate"])

    def revoke_node(self, node: str) -> dict[str, Any]:
        """Shut a machine out; `open_tickets` of the answer could let it in again."""
        return dict(self._rest.json("POST", f"/api/nodes/{quote(node, safe='')}/revoke", json={}))

    # ----------------------------------------------------------------------------- people

    def log_in(self, secret: str, *, name: str) -> Login:
        """Trade the secret of a ticket for an operator's or a viewer's token.

        Raises:
            AuthError: the ticket is unknown, expired, used up or for a node.
        """
        body = {"secret": secret, "name": name}
        answer = self._rest.json("POST", "/api/login", json=body)
        return Login(answer["name"], answer["role"], answer["token"])

    def log_out(self) -> None:
        """End the login whose token this client has."""
        self._rest.call("POST", "/api/logout", json={})

    def audit(self, *, after: int = 0, limit: int = 1_000, name: str = "") -> list[dict[str, Any]]:
        """Return who did what, oldest first; `name`: of one person or node alone."""
        params: dict[str, str | int] = {"after": after, "limit": limit, "name": name}
        return list(self._rest.json("GET", "/api/audit", params=params))

    def create_ticket(
        self,
        *,
        role: str = "node",
        uses: int | None = None,
        valid_s: float | None = None,
        name: str = "",
    ) -> str:
        """Return a new ticket.

        Args:
            role: What it lets in: `node`, `viewer` or `operator`.
            uses: How often it may be used; None: without limit.
            valid_s: Seconds that it is valid; None: without end.
            name: Whom or what it is for.
        """
        body = {"role": role, "uses": uses, "valid_s": valid_s, "name": name}
        return str(self._rest.json("POST", "/api/tickets", json=body)["ticket"])

    def tickets(self) -> list[dict[str, Any]]:
        """Return every ticket without its secret, newest first."""
        return list(self._rest.json("GET", "/api/tickets"))

    def revoke_ticket(self, id: str) -> list[str]:
        """End a ticket, and the logins made with it; return their names.

        Raises:
            ConfigError: there is no such ticket.
        """
        path = f"/api/tickets/{quote(id, safe='')}/revoke"
        return list(self._rest.json("POST", path, json={})["logged_out"])
