"""Who may do what: tickets that let a machine in once, tokens that prove it is still the same.

Secrets are 192 random bits. Of each only the SHA-256 is kept in the database, so a copy of the file
lets nobody in. The two secrets that the hub prints at every start (the operator's token and one
ticket without end) are also in a file that only its owner can read.

A *ticket* becomes a *node token* when a machine joins, or the *login* of an operator or a viewer.
A *job token* belongs to the processes of one job and opens nothing but that job. Each launch of a
member gets one of its own; when a newer launch of the same member gets one, the older opens nothing
any more, so a process that was frozen for an hour cannot push aside the one that took its place.
The *operator token* opens everything.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from atoll.clock import Clock
from atoll.errors import AuthError, Revoked
from atoll.hub.db.database import Database
from atoll.hub.security import tickets
from atoll.hub.security.certificates import write_secret
from atoll.hub.security.connection_limits import RateLimit
from atoll.hub.security.tickets import TicketRole
from atoll.ids import check_name, new_suffix, new_token

Role = Literal["operator", "viewer", "node", "job"]

SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS auth_tokens (
    hash TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS auth_launches (
    hash TEXT PRIMARY KEY, member TEXT NOT NULL, attempt INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS auth_shut_out (hash TEXT PRIMARY KEY);
"""
    + tickets.SCHEMA
)

MAX_FAILURES = 10
"""Wrong secrets of one address within `FAILURE_WINDOW_S` before it has to wait."""

FAILURE_WINDOW_S = 60.0

PEOPLE: tuple[Role, ...] = ("operator", "viewer")
"""Roles of those who log in; nodes join."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a token belongs to."""

    role: Role
    name: str
    """Node id, job id, `operator`, or the name of a login."""
    member: str = ""
    """The member that a job token was made for; empty: any process of the job."""
    attempt: int = 0
    """Which launch of that member."""


class SigningKeys(msgspec.Struct, frozen=True):
    """What the hub prints when it is ready."""

    operator_token: str
    ticket: str
    limited: dict[str, str] = {}
    """Tickets of `--ticket-uses`, by that number: the same after every start."""


class Auth:
    """Tickets and tokens. Tokens are mirrored in memory: every request is checked there."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._failures = RateLimit(clock, most=MAX_FAILURES, window_s=FAILURE_WINDOW_S)
        rows = database.read_now(
            lambda connection: connection.execute(
                "SELECT hash, role, name, coalesce(member, ''), coalesce(attempt, 0)"
                " FROM auth_tokens LEFT JOIN auth_launches USING (hash)"
            ).fetchall()
        )
        self._tokens: dict[str, Identity] = {}
        self._newest: dict[tuple[str, str], int] = {}
        """Newest launch of each member, by job and member."""
        self._shut_out: set[str] = set(
            database.read_now(
                lambda connection: [
                    hash_ for (hash_,) in connection.execute("SELECT hash FROM auth_shut_out")
                ]
            )
        )
        """Tokens that operators have ended: whoever comes with one is told so."""
        for hash_, role, *fields in rows:
            self._know(hash_, Identity(cast("Role", role), *fields))

    def _know(self, digest: str, identity: Identity) -> None:
        self._tokens[digest] = identity
        if identity.attempt:
            key = (identity.name, identity.member)
            self._newest[key] = max(identity.attempt, self._newest.get(key, 0))

    async def open_secrets(self, folder: Path, *, uses: int | None = None) -> SigningKeys:
        """Return the operator's token and the standing ticket, made at the first start.

        Args:
            folder: Where they are kept, readable by the owner alone.
            uses: How often the ticket may be used; None: without limit.
        """
        path = folder / "secrets.json"
        try:
            secrets = msgspec.json.decode(path.read_bytes(), type=SigningKeys)
        except (FileNotFoundError, msgspec.DecodeError):
            secrets = SigningKeys(operator_token=new_token(), ticket=new_token())
        known = secrets.ticket if uses is None else secrets.limited.get(str(uses), "")
        ended = await self._database.read(lambda c: tickets.is_revoked(c, _digest(known)))
        if not known or ended:
            known = new_token()
        if uses is None:
            secrets = msgspec.structs.replace(secrets, ticket=known)
        else:
            limited = {**secrets.limited, str(uses): known}
            secrets = msgspec.structs.replace(secrets, limited=limited)
        write_secret(path, msgspec.json.encode(secrets))
        now = self._clock.wall()

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM auth_tokens WHERE role = 'operator' AND name = 'operator'"
            )
            _insert_token(connection, secrets.operator_token, "operator", "operator", now)
            tickets.insert_ticket(
                connection, _digest(known), uses=uses, made=now, made_by="hub",
                note="the hub prints it",
            )  # fmt: skip

        await self._database.write(write)
        self._forget(Identity("operator", "operator"))
        self._tokens[_digest(secrets.operator_token)] = Identity("operator", "operator")
        return msgspec.structs.replace(secrets, ticket=known)

    async def create_ticket(
        self,
        *,
        role: TicketRole = "node",
        uses: int | None = None,
        valid_s: float | None = None,
        note: str = "",
        made_by: str = "",
    ) -> str:
        """Return the secret of a new ticket.

        Args:
            role: What it lets in.
            uses: How many may use it; None: any number.
            valid_s: Seconds that it is valid; None: without end.
            note: For people.
            made_by: Name of the operator who asked for it.
        """
        secret, now = new_token(), self._clock.wall()
        expires = None if valid_s is None else now + valid_s
        await self._database.write(
            lambda connection: tickets.insert_ticket(
                connection, _digest(secret), role=role, uses=uses, expires=expires, note=note,
                made=now, made_by=made_by,
            )
        )  # fmt: skip
        return secret

    async def list_tickets(self) -> list[dict[str, Any]]:
        """Return every ticket: id, role, uses left, expiry, by whom made and used; no secrets."""
        now = self._clock.wall()
        return await self._database.read(lambda c: tickets.list_tickets(c, now))

    async def revoke_ticket(self, id: str) -> list[str]:
        """End a ticket and the logins that were made with it; return whose they were.

        Nodes that came with it stay: they are shut out one by one.

        Raises:
            ConfigError: there is no such ticket.
        """
        now = self._clock.wall()
        people = await self._database.write(lambda c: tickets.revoke_ticket(c, id, now))
        for name in people:
            for role in PEOPLE:
                await self._revoke(Identity(role, name), tell=True)
        return people

    async def tickets_of(self, node: str) -> list[str]:
        """Return the ids of the tickets that a node came with and that still open."""
        now = self._clock.wall()
        return await self._database.read(lambda c: tickets.tickets_of(c, node, now))

    async def redeem(
        self, secret: str, *, name: str, source: str = "", roles: tuple[str, ...] = ("node",)
    ) -> tuple[str, str]:
        """Let a machine or a person in; return its name and its token.

        The name is `name`, with a suffix when another has that name already.

        Raises:
            AuthError: the ticket is wrong, used up, expired, revoked or for another role.
            ConfigError: the name cannot be a node id.
        """
        self._check_failures(source)
        check_name("node name" if "node" in roles else "name", name)
        now, token, digest = self._clock.wall(), new_token(), _digest(secret)

        def write(connection: sqlite3.Connection) -> Identity:
            role = tickets.use_ticket(connection, digest, roles=roles, now=now)
            free = name
            while free == "operator" or connection.execute(
                "SELECT 1 FROM auth_tokens WHERE role IN ('node', 'viewer', 'operator')"
                " AND name = ?", (free,),
            ).fetchone():  # fmt: skip
                free = f"{name[:58]}-{new_suffix()}"
            _insert_token(connection, token, role, free, now)
            tickets.note_use(connection, digest, role=role, name=free, now=now, source=source)
            return Identity(cast("Role", role), free)

        try:
            identity = await self._database.write(write)
        except AuthError:
            self._failures.note(source)
            raise
        self._tokens[_digest(token)] = identity
        return identity.name, token

    async def issue_job_token(self, job: str, *, member: str = "", attempt: int = 0) -> str:
        """Return a fresh token for the processes of a job.

        Args:
            job: Which job.
            member: For whom it is; empty: any process of the job. Earlier ones stay valid then.
            attempt: Which launch of the member it is for; tokens of earlier launches end.
        """
        token, now = new_token(), self._clock.wall()

        def write(connection: sqlite3.Connection) -> None:
            _insert_token(connection, token, "job", job, now)
            if member:
                connection.execute(
                    "INSERT INTO auth_launches VALUES (?, ?, ?)", (_digest(token), member, attempt)
                )

        await self._database.write(write)
        self._know(_digest(token), Identity("job", job, member, attempt))
        return token

    async def revoke_job(self, job: str) -> None:
        """Make every token of a job invalid."""
        await self._revoke(Identity("job", job))

    async def revoke_node(self, node: str, *, tell: bool = True) -> bool:
        """Shut a machine out, which is told so if it comes back; return whether it was in."""
        return await self._revoke(Identity("node", node), tell=tell)

    def names(self, role: Role) -> list[str]:
        """Return everybody who has a token of this role."""
        return sorted({other.name for other in self._tokens.values() if other.role == role})

    async def revoke_member(self, job: str, member: str) -> None:
        """End the tokens of the processes of one member."""
        await self._revoke(Identity("job", job, member))

    async def log_out(self, identity: Identity) -> bool:
        """End a login; the token that the hub itself prints stays. Return whether it ended."""
        if identity.role not in PEOPLE or identity.name == "operator":
            return False
        return await self._revoke(identity)

    async def _revoke(self, identity: Identity, *, tell: bool = False) -> bool:
        """End every token of an identity; `tell`: who comes with one later is told so."""
        ended = self._forget(identity)

        def write(connection: sqlite3.Connection) -> None:
            for hash_ in ended:
                connection.execute("DELETE FROM auth_launches WHERE hash = ?", (hash_,))
                connection.execute("DELETE FROM auth_tokens WHERE hash = ?", (hash_,))
                if tell:
                    connection.execute("INSERT OR IGNORE INTO auth_shut_out VALUES (?)", (hash_,))

        await self._database.write(write)
        if tell:
            self._shut_out.update(ended)
        return bool(ended)

    def _forget(self, identity: Identity) -> list[str]:
        """Take the tokens of an identity out of memory; return their hashes."""
        role, name, member = identity.role, identity.name, identity.member
        ended = [
            hash_ for hash_, other in self._tokens.items()
            if (other.role, other.name) == (role, name) and member in ("", other.member)
        ]  # fmt: skip
        self._tokens = {h: other for h, other in self._tokens.items() if h not in set(ended)}
        if role == "job" and not member:
            self._newest = {k: v for k, v in self._newest.items() if k[0] != name}
        return ended

    def authenticate(self, token: str, *, source: str = "") -> Identity:
        """Return whom a token belongs to.

        A right token always passes, also from an address that has failed: it cannot be guessed.

        Raises:
            AuthError: nobody has this token.
        """
        digest = _digest(token)
        identity = self._tokens.get(digest)
        if identity is not None:
            # The dictionary found it by its hash, of which an attacker cannot choose a prefix.
            self._check_newest(identity)
            return identity
        if digest in self._shut_out:
            raise Revoked(
                "an operator of the hub has shut this machine or login out",
                remedy="ask them for a fresh ticket, if it was a mistake",
            )
        if token:  # who comes without one is not guessing
            self._check_failures(source)
            self._failures.note(source)
        raise AuthError(
            "this token opens nothing here" if token else "a token is missing",
            expected="the token that `atoll hub` printed, or that this node got when it joined",
            remedy="join again with a fresh ticket, or log in with the operator token",
        )

    def _check_newest(self, identity: Identity) -> None:
        """Refuse a process of a member whose place a newer one has taken."""
        newest = self._newest.get((identity.name, identity.member), 0)
        if identity.attempt < newest:
            raise AuthError(
                "a newer process of this member has taken its place",
                given=f"launch {identity.attempt} of {identity.name}/{identity.member}",
                expected=f"launch {newest}",
                remedy="this process has to end; the newer one goes on",
            )

    def is_limited(self, source: str) -> bool:
        """Return whether an address has to wait because it failed too often."""
        return self._failures.reached(source)

    def _check_failures(self, source: str) -> None:
        """Refuse an address that came with too many wrong secrets lately."""
        if self._failures.reached(source):
            raise AuthError(
                "too many wrong secrets from this address",
                given=source,
                remedy=f"wait {FAILURE_WINDOW_S:.0f} s, then use a ticket or token that is right",
            )

    def may_open_session(self, identity: Identity, session: str) -> bool:
        """Return whether this identity may speak under a session address."""
        if identity.role == "operator":
            return True
        if identity.role == "node":
            return session == identity.name
        if identity.role == "viewer":
            return False
        job, _, member = session.partition("/")
        return job == identity.name and bool(member) and identity.member in ("", member)


def may_use_queue(identity: Identity, queue: str, *, shared: Iterable[str] = ()) -> bool:
    """Return whether this identity may put into and claim from a queue.

    A node has `node/ITS-ID`, a job the queues whose names start with `ITS-ID/` and those that
    `shared`, the `[job] queues` of its spec, lists, or that are below one of these (`a/b` of `a`).
    """
    if identity.role == "operator":
        return True
    if identity.role == "node":
        return queue == f"node/{identity.name}"
    if identity.role == "viewer" or queue.startswith("node/"):
        return False
    return queue in shared or queue.startswith((f"{identity.name}/", *(f"{s}/" for s in shared)))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _insert_token(
    connection: sqlite3.Connection, token: str, role: str, name: str, now: float
) -> None:
    connection.execute(
        "INSERT INTO auth_tokens VALUES (?, ?, ?, ?)", (_digest(token), role, name, now)
    )
