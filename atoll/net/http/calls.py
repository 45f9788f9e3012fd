"""REST calls for access, deletion, rendezvous and queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from atoll.errors import HubError, WireError
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
from atoll.wire.pairing import PairProof, PairShare, PairStart, PairTicket

T = TypeVar("T")


class Joined(NamedTuple):
    """Result of joining with a ticket."""

    node: str
    token: str
    certificate: str
    """PEM; empty if the hub requires none."""


class Login(NamedTuple):
    """Result of a login with a ticket."""

    name: str
    role: str
    token: str


class PairingCalls:
    """Pairing by a short code: both steps of a machine, and the code for operators."""

    _rest: HttpSession

    def start_pairing(self, share: bytes) -> PairShare:
        """Send a share and return the hub's; AuthError if no code is open."""
        body = msgspec.to_builtins(PairStart(share))
        return self._pairing_answer("/api/pair", body, PairShare)

    def finish_pairing(self, exchange: str, proof: bytes) -> PairTicket:
        """Send the proof and return the hub's, with the sealed ticket; WrongCode if refused."""
        body = msgspec.to_builtins(PairProof(exchange, proof))
        return self._pairing_answer("/api/pair/finish", body, PairTicket)

    def _pairing_answer(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        try:
            return msgspec.convert(self._rest.json("POST", path, json=body), kind)
        except msgspec.ValidationError as error:
            raise WireError("the answer to a pairing is wrong", given=str(error)[:300]) from error

    def pairing(self, *, renew: bool = False) -> dict[str, Any]:
        """Return {"state", "code", "left_s", "tries_left"}; `renew`: of a new code."""
        if renew:
            return dict(self._rest.json("POST", "/api/pairing", json={}))
        return dict(self._rest.json("GET", "/api/pairing"))


class SecretCalls:
    """Secrets of users: their names for operators, their values for the jobs that use them."""

    _rest: HttpSession

    def set_secret(self, name: str, value: str) -> None:
        """Store a secret, or replace it."""
        self._rest.call("PUT", f"/api/secrets/{quote(name, safe='')}", json={"value": value})

    def secrets(self) -> list[dict[str, Any]]:
        """Return name, time of the last change and who made it; never a value."""
        return list(self._rest.json("GET", "/api/secrets"))

    def remove_secret(self, name: str) -> None:
        """Delete a secret."""
        self._rest.call("DELETE", f"/api/secrets/{quote(name, safe='')}")

    def secrets_of(self, job: str) -> dict[str, str]:
        """Return the values of the secrets of a job, by name, to a process of that job."""
        return dict(self._rest.json("GET", f"/api/jobs/{quote(job, safe='')}/secrets"))


class AccessCalls:
    """Tickets, logins and the audit log."""

    _rest: HttpSession

    def join(self, secret: str, *, name: str, info: NodeInfo, request: str = "") -> Joined:
        """Exchange a ticket's secret for a node id and a node token.

        `name` is the requested node id; `request` a PEM signing request for the node's key, if the
        hub uses TLS.

        Raises:
            AuthError: the ticket is unknown, expired, used up or not for a node.
        """
        known = msgspec.to_builtins(info)
        body = {"secret": secret, "name": name, "info": known, "request": request}
        answer = self._rest.json("POST", "/api/join", json=body)
        return Joined(answer["node"], answer["token"], answer.get("certificate", ""))

    def renew(self, request: str) -> str:
        """Return a new certificate (PEM) for the node that authenticates this call."""
        return str(self._rest.json("POST", "/api/renew", json={"request": request})["certificate"])

    def revoke_node(self, node: str) -> dict[str, Any]:
        """Revoke a node; `open_tickets` of the answer could still admit it."""
        return dict(self._rest.json("POST", f"/api/nodes/{quote(node, safe='')}/revoke", json={}))

    # ----------------------------------------------------------------------------- logins

    def log_in(self, secret: str, *, name: str) -> Login:
        """Exchange a ticket's secret for an operator's or a viewer's token.

        Raises:
            AuthError: the ticket is unknown, expired, used up or for a node.
        """
        body = {"secret": secret, "name": name}
        answer = self._rest.json("POST", "/api/login", json=body)
        return Login(answer["name"], answer["role"], answer["token"])

    def log_out(self) -> None:
        """End the login of this client's token."""
        self._rest.call("POST", "/api/logout", json={})

    def keys(self) -> dict[str, Any]:
        """Return the hub's authorities and when they change; see `hub/http/keys.py`."""
        return dict(self._rest.json("GET", "/api/keys"))

    def rotate(self, what: str, *, overlap_s: float) -> dict[str, Any]:
        """Replace the `authority`, the `certificate` or the `operator` token of the hub."""
        body = {"what": what, "overlap_s": overlap_s}
        return dict(self._rest.json("POST", "/api/keys/rotate", json=body))

    def audit(self, *, after: int = 0, limit: int = 1_000, name: str = "") -> list[dict[str, Any]]:
        """Return audit entries, oldest first; `name`: of one person or node."""
        params: dict[str, str | int] = {"after": after, "limit": limit, "name": name}
        return list(self._rest.json("GET", "/api/audit", params=params))

    def create_ticket(
        self,
        *,
        role: str = "node",
        uses: int | None = None,
        valid_s: float | None = None,
        name: str = "",
        quotas: Mapping[str, int] | None = None,
        queues: Sequence[str] = (),
    ) -> str:
        """Return a new ticket for a `node`, `viewer`, `operator` or `program`; None: unlimited.

        `quotas` are limits of those who come with it, by name; others have the hub's. `queues` are
        names below which a program may use queues and topics; empty: all that are shared.
        """
        body = {
            "role": role, "uses": uses, "valid_s": valid_s, "name": name,
            "quotas": dict(quotas or {}), "queues": list(queues),
        }  # fmt: skip
        return str(self._rest.json("POST", "/api/tickets", json=body)["ticket"])

    def tickets(self) -> list[dict[str, Any]]:
        """Return all tickets without their secrets, newest first."""
        return list(self._rest.json("GET", "/api/tickets"))

    def revoke_ticket(self, id: str) -> list[str]:
        """Revoke a ticket and the logins made with it; return their names."""
        path = f"/api/tickets/{quote(id, safe='')}/revoke"
        return list(self._rest.json("POST", path, json={})["logged_out"])


DELETION_S = 60.0
"""Timeout of a deletion; the hub waits a while for the last files."""


class DeletionCalls:
    """Deletion of ended jobs."""

    _rest: HttpSession

    def job_size(self, job: str) -> dict[str, Any]:
        """Return `files`, `queue_items` and their bytes that deletion would remove."""
        return dict(self._rest.json("GET", f"{_deletion_path(job)}/size", timeout=DELETION_S))

    def delete_job(self, job: str, *, keep_files: bool = False) -> dict[str, Any]:
        """Delete an ended job; with `keep_files` its folder at the hub stays.

        Returns the figures of :meth:`job_size`, and `finished`: False while files are being
        removed.

        Raises:
            HubError: it has not ended, or there is no such job.
        """
        params = {"keep_files": int(keep_files)}
        answer = self._rest.json("DELETE", _deletion_path(job), params=params, timeout=DELETION_S)
        return dict(answer)


def _deletion_path(job: str) -> str:
    return f"/api/jobs/{quote(job, safe='')}"


class RendezvousCalls:
    """Calls by which the hosts of an island find each other."""

    _rest: HttpSession

    def publish_rendezvous(self, job: str, member: str, address: RendezvousAddress) -> None:
        """Publish the address of the first host of this member's island.

        The hub forgets it when it restarts, and when the member is launched again.

        Raises:
            AuthError: the token is not that of this member.
            HubError: the job is not running.
        """
        self._rest.call(
            "PUT",
            _rendezvous_path(job, member),
            content=msgspec.json.encode(address),
            headers={"Content-Type": "application/json"},
        )

    def find_rendezvous(self, job: str, member: str) -> RendezvousAddress | None:
        """Return the address of the first host of a member's island; None: not published.

        Raises:
            AuthError: the token belongs neither to this member nor to one of its followers.
        """
        absent = HubError("no rendezvous is published", given=f"{job}/{member}")
        try:
            response = self._rest.call("GET", _rendezvous_path(job, member), absent=absent)
        except HubError as error:
            if error is absent:
                return None
            raise
        return msgspec.json.decode(response.content, type=RendezvousAddress)


def _rendezvous_path(job: str, member: str) -> str:
    return f"/api/jobs/{quote(job, safe='')}/rendezvous/{quote(member, safe='')}"


M = TypeVar("M", bound=Message)


class QueueCalls:
    """Queues over HTTP, for programs without a session with the hub."""

    _rest: HttpSession
    _timeout_s: float

    def queues(self) -> list[dict[str, Any]]:
        """Return depth and rates of all queues and topics."""
        return list(self._rest.json("GET", "/api/queues"))

    def dead_letters(self, queue: str) -> list[dict[str, Any]]:
        """Return the dead letters of a queue."""
        return list(self._rest.json("GET", "/api/queues/dead", params={"queue": queue}))

    def requeue(self, queue: str, *, seq: int | None = None) -> int:
        """Make a dead letter (None: all) ready again; return how many."""
        return self._letters("requeue", queue, seq)

    def discard(self, queue: str, *, seq: int | None = None) -> int:
        """Delete a dead letter (None: all); return how many."""
        return self._letters("discard", queue, seq)

    def _letters(self, verb: str, queue: str, seq: int | None) -> int:
        body = {"queue": queue, "seq": seq}
        return int(self._rest.json("POST", f"/api/queues/{verb}", json=body)["items"])

    def queue_open(self, queue: str, options: QueueOptions, *, topic: bool = False) -> None:
        """Set the options of a queue or topic."""
        self._queue("open", QueueOpen(queue, options, topic), Done)

    def queue_put(self, queue: str, *, key: str, payload: bytes) -> QueuePutDone:
        """Store an item durably; a repeated key is stored once."""
        return self._queue("put", QueuePut(queue, key, payload), QueuePutDone)

    def queue_claim(
        self, queue: str, *, lease_s: float, limit: int = 1, wait_s: float = 0.0
    ) -> list[QueueItem]:
        """Lease up to `limit` items for `lease_s`; wait up to `wait_s` for the first."""
        claim = QueueClaim(queue, lease_s, limit, wait_s)
        return self._queue("claim", claim, QueueItems, wait_s=wait_s).items

    def queue_ack(self, queue: str, *, lease: str) -> None:
        """Acknowledge a leased item; raises HubError if the lease was lost to another claim."""
        self._queue("ack", QueueAck(queue, lease), Done)

    def queue_extend(self, queue: str, *, lease: str, lease_s: float) -> None:
        """Extend a lease to `lease_s` from now; raises as `queue_ack` does."""
        self._queue("extend", QueueExtend(queue, lease, lease_s), Done)

    def queue_release(self, queue: str, *, lease: str, reason: str = "") -> None:
        """Release a leased item; after too many releases it becomes a dead letter."""
        self._queue("release", QueueRelease(queue, lease, reason), Done)

    def _queue(self, verb: str, body: Message, answer: type[M], *, wait_s: float = 0.0) -> M:
        response = self._rest.call(
            "POST",
            f"/api/queues/{verb}",
            content=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
            timeout=self._timeout_s + wait_s,
        )
        return msgspec.json.decode(response.content, type=answer)
