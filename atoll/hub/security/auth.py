"""Authentication: tickets admit a machine or person, tokens identify it; stored as SHA-256.

A *ticket* is exchanged for a *node token*, or for the *login* of an operator, viewer or program. A
*job token* gives access to one job. Each launch of a member gets its own, which invalidates earlier
ones, so that a suspended process cannot displace its replacement. The *operator token* gives access
to everything.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from atoll.clock import Clock
from atoll.errors import AuthError, Revoked
from atoll.hub.db.database import Database
from atoll.hub.security import browser_logins, hub_secrets, scopes, tickets
from atoll.hub.security.browser_logins import BrowserLogins
from atoll.hub.security.connection_limits import RateLimit
from atoll.hub.security.hub_secrets import HubSecrets
from atoll.hub.security.roles import LOGINS as LOGINS
from atoll.hub.security.roles import PEOPLE as PEOPLE
from atoll.hub.security.roles import PROGRAM as PROGRAM
from atoll.hub.security.roles import Identity as Identity
from atoll.hub.security.roles import Role as Role
from atoll.hub.security.tickets import NewTicket, TicketRole
from atoll.ids import check_name, new_suffix, new_token

SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS auth_tokens (
    hash TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS auth_launches (
    hash TEXT PRIMARY KEY, member TEXT NOT NULL, attempt INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS auth_shut_out (hash TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS auth_shut_out_names (name TEXT PRIMARY KEY);
"""
    + tickets.SCHEMA
    + scopes.SCHEMA
    + browser_logins.SCHEMA
)

MAX_FAILURES = 10
"""Failed attempts of one address within `FAILURE_WINDOW_S` after which it must wait."""

FAILURE_WINDOW_S = 60.0


class Auth:
    """Tickets and tokens. Tokens are cached in memory, where every request is checked."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self.browsers = BrowserLogins(database, clock=clock)
        self._failures = RateLimit(clock, most=MAX_FAILURES, window_s=FAILURE_WINDOW_S)
        rows = database.read_now(
            lambda connection: connection.execute(
                "SELECT hash, role, name, coalesce(member, ''), coalesce(attempt, 0), queues"
                " FROM auth_tokens LEFT JOIN auth_launches USING (hash)"
                " LEFT JOIN auth_program_queues USING (name)"
            ).fetchall()
        )
        self._folder = Path()
        self._secrets = HubSecrets(operator_token=new_token(), ticket=new_token())
        """Replaced by those that the hub keeps, in `open_secrets`."""
        self._tokens: dict[str, Identity] = {}
        self._newest: dict[tuple[str, str], int] = {}
        self._shut_out: set[str] = set(
            database.read_now(
                lambda connection: [
                    hash_ for (hash_,) in connection.execute("SELECT hash FROM auth_shut_out")
                ]
            )
        )
        """Hashes of tokens revoked by an operator; clients using one get a specific error."""
        for hash_, role, name, member, attempt, queues in rows:
            permitted = scopes.read_scopes(queues) if role == PROGRAM else ()
            self._know(hash_, Identity(cast("Role", role), name, member, attempt, permitted))

    def _know(self, digest: str, identity: Identity) -> None:
        self._tokens[digest] = identity
        if identity.attempt:
            key = (identity.name, identity.member)
            self._newest[key] = max(identity.attempt, self._newest.get(key, 0))

    async def open_secrets(self, folder: Path, *, uses: int | None = None) -> HubSecrets:
        """Return the operator token and the permanent ticket, which `uses` may limit.

        They are created at the first start in a file that only its owner can read.
        """
        secrets = hub_secrets.load_or_make(folder)
        known = secrets.ticket if uses is None else secrets.limited.get(str(uses), "")
        ended = await self._database.read(lambda c: tickets.is_revoked(c, _digest(known)))
        if not known or ended:
            known = new_token()
        if uses is None:
            secrets = msgspec.structs.replace(secrets, ticket=known)
        else:
            limited = {**secrets.limited, str(uses): known}
            secrets = msgspec.structs.replace(secrets, limited=limited)
        now = self._clock.wall()
        former = {hash_: until for hash_, until in secrets.former.items() if until > now}
        secrets = msgspec.structs.replace(secrets, former=former)
        hub_secrets.save(folder, secrets)
        self._folder, self._secrets = folder, secrets

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM auth_tokens WHERE role = 'operator' AND name = 'operator'"
            )
            for hash_ in (_digest(secrets.operator_token), *former):
                _insert_token(connection, hash_, "operator", "operator", now)
            ticket = NewTicket(uses=uses, made=now, made_by="hub", note="the hub prints it")
            tickets.insert_ticket(connection, _digest(known), ticket)

        if _digest(secrets.operator_token) not in self._tokens:
            await self.browsers.end_all("operator", "operator")
        await self._database.write(write)
        self._forget(Identity("operator", "operator"))
        for hash_ in (_digest(secrets.operator_token), *former):
            self._tokens[hash_] = Identity("operator", "operator")
        return msgspec.structs.replace(secrets, ticket=known)

    async def rotate_operator(self, *, overlap_s: float) -> str:
        """Return a new operator token; the present one is good for `overlap_s` more."""
        now, token = self._clock.wall(), new_token()
        former = {hash_: until for hash_, until in self._secrets.former.items() if overlap_s}
        if overlap_s:
            former[_digest(self._secrets.operator_token)] = now + overlap_s
        hub_secrets.save(
            self._folder,
            msgspec.structs.replace(self._secrets, operator_token=token, former=former),
        )
        await self.open_secrets(self._folder)
        return token

    async def create_ticket(
        self,
        *,
        role: TicketRole = "node",
        uses: int | None = None,
        valid_s: float | None = None,
        note: str = "",
        made_by: str = "",
        quotas: Mapping[str, int] | None = None,
        queues: Sequence[str] = (),
    ) -> str:
        """Return the secret of a new ticket, see `NewTicket`.

        `uses` None: unlimited; `valid_s` None: no expiry. `note` and `made_by` are shown in lists.
        """
        secret, now = new_token(), self._clock.wall()
        expires = None if valid_s is None else now + valid_s
        ticket = NewTicket(
            role=role, uses=uses, expires=expires, note=note, made=now, made_by=made_by,
            quotas=quotas or {}, queues=queues,
        )  # fmt: skip
        await self._database.write(
            lambda connection: tickets.insert_ticket(connection, _digest(secret), ticket)
        )
        return secret

    async def list_tickets(self) -> list[dict[str, Any]]:
        """Return every ticket without its secret; see :func:`tickets.list_tickets`."""
        now = self._clock.wall()
        return await self._database.read(lambda c: tickets.list_tickets(c, now))

    async def revoke_ticket(self, id: str) -> list[str]:
        """Revoke a ticket and its logins, but not its nodes; return the logins' names.

        Raises ConfigError if there is no such ticket.
        """
        now = self._clock.wall()
        people = await self._database.write(lambda c: tickets.revoke_ticket(c, id, now))
        for name in people:
            for role in LOGINS:
                await self._revoke(Identity(role, name), tell=True)
        return people

    async def tickets_of(self, node: str) -> list[str]:
        """Return the ids of the still valid tickets that a node has used."""
        now = self._clock.wall()
        return await self._database.read(lambda c: tickets.tickets_of(c, node, now))

    async def redeem(
        self, secret: str, *, name: str, source: str = "", roles: tuple[str, ...] = ("node",)
    ) -> tuple[str, str]:
        """Exchange a ticket for a token; return the name, made unique by a suffix, and the token.

        Raises:
            AuthError: the ticket is wrong, used up, expired, revoked or for another role.
            ConfigError: the name cannot be a node id.
        """
        check_name("node name" if "node" in roles else "name", name)
        now, token, digest = self._clock.wall(), new_token(), _digest(secret)

        def write(connection: sqlite3.Connection) -> Identity:
            role = tickets.use_ticket(connection, digest, roles=roles, now=now)
            free = name
            while (
                free == "operator"
                or connection.execute(
                    "SELECT 1 FROM auth_tokens WHERE role != 'job'"
                    " AND name = ? UNION SELECT 1 FROM auth_shut_out_names WHERE name = ?",
                    (free, free),
                ).fetchone()
            ):
                free = f"{name[:58]}-{new_suffix()}"
            _insert_token(connection, _digest(token), role, free, now)
            tickets.note_use(connection, digest, role=role, name=free, now=now, source=source)
            permitted = scopes.pass_on(connection, digest, name=free) if role == PROGRAM else ()
            return Identity(cast("Role", role), free, queues=permitted)

        try:  # a wrong ticket costs no write transaction
            await self._database.read(lambda c: tickets.check_known(c, digest))
            identity = await self._database.write(write)
        except AuthError:  # a valid ticket passes even from a rate-limited address
            self._check_failures(source)
            self._failures.note(source)
            raise
        self._tokens[_digest(token)] = identity
        return identity.name, token

    async def issue_job_token(self, job: str, *, member: str = "", attempt: int = 0) -> str:
        """Return a new token for the processes of a job.

        With `member`, launch number `attempt` invalidates the tokens of its earlier launches.
        Without, any process may use it and earlier tokens stay valid.
        """
        token, now = new_token(), self._clock.wall()

        def write(connection: sqlite3.Connection) -> None:
            _insert_token(connection, _digest(token), "job", job, now)
            if member:
                connection.execute(
                    "INSERT INTO auth_launches VALUES (?, ?, ?)", (_digest(token), member, attempt)
                )

        await self._database.write(write)
        self._know(_digest(token), Identity("job", job, member, attempt))
        return token

    def key_of_members(self, job: str) -> bytes:
        """Return the key by which a job's members authenticate each other; it outlives restarts."""
        return hmac.digest(self._secrets.members.encode(), f"members of {job}".encode(), "sha256")

    async def revoke_job(self, job: str) -> None:
        """Revoke every token of a job."""
        await self._revoke(Identity("job", job))

    async def revoke_node(self, node: str, *, tell: bool = True) -> bool:
        """Revoke a node's tokens; return whether it had any. With `tell`, use raises `Revoked`."""
        return await self._revoke(Identity("node", node), tell=tell)

    def names(self, role: Role) -> list[str]:
        """Return the names of all token owners with this role, sorted."""
        return sorted({other.name for other in self._tokens.values() if other.role == role})

    async def revoke_member(self, job: str, member: str) -> None:
        """Revoke the tokens of one member."""
        await self._revoke(Identity("job", job, member))

    async def log_out(self, identity: Identity) -> bool:
        """End a login; return whether it ended. The operator token of the hub cannot be ended."""
        if identity.role not in LOGINS or identity.name == "operator":
            return False
        return await self._revoke(identity)

    async def _revoke(self, identity: Identity, *, tell: bool = False) -> bool:
        """Delete every token of an identity; with `tell`, later uses raise `Revoked`."""
        ended = self._forget(identity)

        def write(connection: sqlite3.Connection) -> None:
            for hash_ in ended:
                connection.execute("DELETE FROM auth_launches WHERE hash = ?", (hash_,))
                connection.execute("DELETE FROM auth_tokens WHERE hash = ?", (hash_,))
                if tell:
                    connection.execute("INSERT OR IGNORE INTO auth_shut_out VALUES (?)", (hash_,))
            if tell:  # so that no other machine or login gets the revoked name
                connection.execute(
                    "INSERT OR IGNORE INTO auth_shut_out_names VALUES (?)", (identity.name,)
                )

        await self._database.write(write)
        await self.browsers.end_all(identity.role, identity.name)
        if tell:
            self._shut_out.update(ended)
        return bool(ended)

    def _forget(self, identity: Identity) -> list[str]:
        """Remove the tokens of an identity from memory; return their hashes."""
        role, name, member = identity.role, identity.name, identity.member
        ended = [
            hash_ for hash_, other in self._tokens.items()
            if (other.role, other.name) == (role, name) and member in ("", other.member)
        ]  # fmt: skip
        gone = set(ended)
        self._tokens = {h: other for h, other in self._tokens.items() if h not in gone}
        if role == "job" and not member:
            self._newest = {k: v for k, v in self._newest.items() if k[0] != name}
        return ended

    def authenticate(self, token: str, *, source: str = "") -> Identity:
        """Return the owner of a token; valid ones pass even from a rate-limited address.

        Raises:
            AuthError: the token is unknown, or its member has a newer launch.
            Revoked: an operator has revoked it.
        """
        digest = _digest(token)
        identity = self._tokens.get(digest)
        if identity is not None and self._clock.wall() < self._secrets.former.get(digest, math.inf):
            # Looked up by its hash, so timing reveals no prefix that an attacker could extend.
            self._check_newest(identity)
            return identity
        if digest in self._shut_out:
            raise Revoked(
                "an operator of the hub has revoked the access of this machine or login",
                remedy="ask for a fresh ticket if this was a mistake",
            )
        if token:  # a request without a token is not a guess
            self._check_failures(source)
            self._failures.note(source)
        raise AuthError(
            "this token is not valid at this hub" if token else "a token is missing",
            expected="the token that `atoll hub` printed, or that this node got when it joined",
            remedy="join again with a fresh ticket, or log in with the operator token",
        )

    def authenticate_browser(self, secret: str, *, source: str = "") -> Identity:
        """Return the owner of a dashboard's cookie; raises AuthError as `authenticate`."""
        found = self.browsers.find(secret)
        if found is not None:
            return Identity(cast("Role", found[0]), found[1])
        self._check_failures(source)
        self._failures.note(source)
        raise AuthError(
            "this browser is not logged in, or no longer",
            remedy="log in again with the token of `atoll hub` or `atoll login`",
        )

    def _check_newest(self, identity: Identity) -> None:
        newest = self._newest.get((identity.name, identity.member), 0)
        if identity.attempt < newest:
            raise AuthError(
                "a newer process of this member has taken its place",
                given=f"launch {identity.attempt} of {identity.name}/{identity.member}",
                expected=f"launch {newest}",
                remedy="this process has to end; the newer one continues",
            )

    def is_limited(self, source: str) -> bool:
        """Return whether an address must wait after too many failures."""
        return self._failures.reached(source)

    def _check_failures(self, source: str) -> None:
        if self._failures.reached(source):
            raise AuthError(
                "too many wrong secrets from this address",
                given=source,
                remedy=f"wait {FAILURE_WINDOW_S:.0f} s, then use a ticket or token that is right",
            )

    def may_open_session(self, identity: Identity, session: str) -> bool:
        """Return whether this identity may open the session `session` (`NODE` or `JOB/MEMBER`)."""
        if identity.role == "operator":
            return True
        if identity.role == "node":
            return session == identity.name
        if identity.role == "viewer":
            return False
        if identity.role == PROGRAM:
            return session.startswith(f"program/{identity.name}.")
        job, _, member = session.partition("/")
        return job == identity.name and bool(member) and identity.member in ("", member)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _insert_token(
    connection: sqlite3.Connection, digest: str, role: str, name: str, now: float
) -> None:
    connection.execute("INSERT INTO auth_tokens VALUES (?, ?, ?, ?)", (digest, role, name, now))
