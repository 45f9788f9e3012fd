"""Calls of the hub's REST interface by which machines and people come and go.

Calls of the hub's REST interface by which jobs that have ended are deleted.

Calls of the hub's REST interface by which the machines of an island find each other.

Queues over HTTP, for programs that have no session with the hub.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from atoll.errors import HubError
from atoll.net.http.http import HttpSession
from atoll.wire.messages import (
    Done,
    Message,
    NodeInfo,
    QueueAck,
    QueueClaim,
    QueueExtend,
    QueueItem,
    QueueItems,
    QueueOpen,
    QueueOptions,
    QueuePut,
    QueuePutDone,
    QueueRelease,
    RendezvousAddress,
)


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

    _rest: HttpSession

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


DELETION_S = 60.0
"""Time for the answer to a deletion: the hub waits a while for what is left to go."""


class DeletionCalls:
    """The part of a client of the hub that is about deleting jobs."""

    _rest: HttpSession

    def job_size(self, job: str) -> dict[str, Any]:
        """Return what would go with a job: `files`, `queue_items`, and bytes of each kind."""
        return dict(self._rest.json("GET", f"{_deletion_path(job)}/size", timeout=DELETION_S))

    def delete_job(self, job: str, *, keep_files: bool = False) -> dict[str, Any]:
        """Delete a job that has ended, and what is left of it.

        Args:
            job: Which.
            keep_files: Leave its folder at the hub as it is.

        Returns:
            What :meth:`job_size` told, and `finished`: False when the rest goes a little later.

        Raises:
            HubError: it has not ended, or there is no such job.
        """
        params = {"keep_files": int(keep_files)}
        answer = self._rest.json("DELETE", _deletion_path(job), params=params, timeout=DELETION_S)
        return dict(answer)


def _deletion_path(job: str) -> str:
    return f"/api/jobs/{quote(job, safe='')}"


class RendezvousCalls:
    """The part of a client of the hub that is about the gates of islands."""

    _rest: HttpSession

    def open_gate(self, job: str, member: str, gate: RendezvousAddress) -> None:
        """Tell the hands of this member where its island's first machine awaits them.

        The hub forgets it when it restarts, and when the member is launched again.

        Raises:
            AuthError: the token is not that of this member.
            HubError: the job does not run.
        """
        self._rest.call(
            "PUT",
            _rendezvous_path(job, member),
            content=msgspec.json.encode(gate),
            headers={"Content-Type": "application/json"},
        )

    def gate(self, job: str, member: str) -> RendezvousAddress | None:
        """Return where a member's island awaits its hands; None: nowhere, for now.

        Raises:
            AuthError: the token is that of neither this member nor one of its hands.
        """
        absent = HubError("no such gate", given=f"{job}/{member}")
        try:
            response = self._rest.call("GET", _rendezvous_path(job, member), absent=absent)
        except HubError as error:
            if error is absent:
                return None
            raise
        return msgspec.json.decode(response.content, type=RendezvousAddress)


def _rendezvous_path(job: str, member: str) -> str:
    return f"/api/jobs/{quote(job, safe='')}/gates/{quote(member, safe='')}"


M = TypeVar("M", bound=Message)


class QueueCalls:
    """The part of `HubClient` that is about queues."""

    _rest: HttpSession
    _timeout_s: float

    def queues(self) -> list[dict[str, Any]]:
        """Return of each queue and topic how full it is and how fast it moves."""
        return list(self._rest.json("GET", "/api/queues"))

    def dead_letters(self, queue: str) -> list[dict[str, Any]]:
        """Return the items of a queue that were given back too often."""
        return list(self._rest.json("GET", "/api/queues/dead", params={"queue": queue}))

    def requeue(self, queue: str, *, seq: int | None = None) -> int:
        """Make a dead letter (None: all) ready again; return how many."""
        return self._letters("requeue", queue, seq)

    def discard(self, queue: str, *, seq: int | None = None) -> int:
        """Give a dead letter (None: all) up for good; return how many."""
        return self._letters("discard", queue, seq)

    def _letters(self, verb: str, queue: str, seq: int | None) -> int:
        body = {"queue": queue, "seq": seq}
        return int(self._rest.json("POST", f"/api/queues/{verb}", json=body)["items"])

    def queue_open(self, queue: str, options: QueueOptions, *, topic: bool = False) -> None:
        """Give a queue or topic its options."""
        self._queue("open", QueueOpen(queue, options, topic), Done)

    def queue_put(self, queue: str, *, key: str, payload: bytes) -> QueuePutDone:
        """Store an item durably; the same key again is stored once."""
        return self._queue("put", QueuePut(queue, key, payload), QueuePutDone)

    def queue_claim(
        self, queue: str, *, lease_s: float, limit: int = 1, wait_s: float = 0.0
    ) -> list[QueueItem]:
        """Lease up to `limit` items for `lease_s`; waits up to `wait_s` for the first."""
        claim = QueueClaim(queue, lease_s, limit, wait_s)
        return self._queue("claim", claim, QueueItems, wait_s=wait_s).items

    def queue_ack(self, queue: str, *, lease: str) -> None:
        """Say that a leased item is done.

        Raises:
            HubError: the lease was lost to another claim.
        """
        self._queue("ack", QueueAck(queue, lease), Done)

    def queue_extend(self, queue: str, *, lease: str, lease_s: float) -> None:
        """Let a lease end `lease_s` from now; raises as `queue_ack` does."""
        self._queue("extend", QueueExtend(queue, lease, lease_s), Done)

    def queue_release(self, queue: str, *, lease: str, reason: str = "") -> None:
        """Give a leased item back; too often makes it a dead letter."""
        self._queue("release", QueueRelease(queue, lease, reason), Done)

    def _queue(self, verb: str, body: Message, answer: type[M], *, wait_s: float = 0.0) -> M:
        """Send a message of the wire as JSON and return the one that answers it."""
        response = self._rest.call(
            "POST",
            f"/api/queues/{verb}",
            content=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
            timeout=self._timeout_s + wait_s,
        )
        return msgspec.json.decode(response.content, type=answer)
