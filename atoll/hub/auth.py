"""Who may do what: tickets that let a machine in once, tokens that prove it is still the same.

Secrets are 192 random bits. Of each only the SHA-256 is kept in the database, so a copy of the file
lets nobody in. The two secrets that the hub prints at every start (the operator's token and one
ticket without end) are also in a file that only its owner can read.

A *ticket* becomes a *node token* when a machine joins. A *job token* belongs to the processes of
one job and opens nothing but that job. Each launch of a member gets one of its own; when a newer
launch of the same member gets one, the older opens nothing any more, so a process that was frozen
for an hour cannot push aside the one that took its place. The *operator token* opens everything.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import hmac
import os
import sqlite3
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from atoll.clock import Clock
from atoll.errors import AuthError
from atoll.hub.database import Database
from atoll.ids import check_name, new_suffix, new_token

Role = Literal["operator", "node", "job"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS auth_tickets (
    hash TEXT PRIMARY KEY, uses_left INTEGER, expires REAL
);
CREATE TABLE IF NOT EXISTS auth_tokens (
    hash TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS auth_launches (
    hash TEXT PRIMARY KEY, member TEXT NOT NULL, attempt INTEGER NOT NULL
);
"""

MAX_FAILURES = 10
"""Wrong secrets of one address within `FAILURE_WINDOW_S` before it has to wait."""

FAILURE_WINDOW_S = 60.0
_MAX_SOURCES = 1_024
"""Addresses whose failures are remembered; the oldest is forgotten first."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a token belongs to."""

    role: Role
    name: str
    """Node id, job id, or `operator`."""
    member: str = ""
    """The member that a job token was made for; empty: any process of the job."""
    attempt: int = 0
    """Which launch of that member."""


class Secrets(msgspec.Struct, frozen=True):
    """What the hub prints when it is ready."""

    operator_token: str
    ticket: str


class FailureLimit:
    """Counts wrong secrets per address, in bounded memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: collections.OrderedDict[str, collections.deque[float]]
        self._failures = collections.OrderedDict()

    def reached(self, source: str) -> bool:
        """Return whether an address failed too often lately."""
        times = self._failures.get(source)
        if times is None:
            return False
        now = self._clock.monotonic()
        while times and times[0] <= now - FAILURE_WINDOW_S:
            times.popleft()
        return len(times) >= MAX_FAILURES

    def check(self, source: str) -> None:
        """Refuse an address that failed too often lately.

        Raises:
            AuthError: it has to wait.
        """
        if self.reached(source):
            raise AuthError(
                "too many wrong secrets from this address",
                given=source,
                remedy=f"wait {FAILURE_WINDOW_S:.0f} s, then use a ticket or token that is right",
            )

    def failed(self, source: str) -> None:
        """Count one wrong secret."""
        times = self._failures.pop(source, None) or collections.deque(maxlen=MAX_FAILURES)
        times.append(self._clock.monotonic())
        self._failures[source] = times
        if len(self._failures) > _MAX_SOURCES:
            self._failures.popitem(last=False)


class Auth:
    """Tickets and tokens. Tokens are mirrored in memory: every request is checked there."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._limit = FailureLimit(clock)
        rows = database.read_now(
            lambda connection: connection.execute(
                "SELECT hash, role, name, coalesce(member, ''), coalesce(attempt, 0)"
                " FROM auth_tokens LEFT JOIN auth_launches USING (hash)"
            ).fetchall()
        )
        self._tokens: dict[str, Identity] = {}
        self._newest: dict[tuple[str, str], int] = {}
        """Newest launch of each member, by job and member."""
        for hash_, *fields in rows:
            self._know(hash_, Identity(*fields))

    def _know(self, digest: str, identity: Identity) -> None:
        self._tokens[digest] = identity
        if identity.attempt:
            key = (identity.name, identity.member)
            self._newest[key] = max(identity.attempt, self._newest.get(key, 0))

    async def open_secrets(self, folder: Path) -> Secrets:
        """Return the operator's token and the ticket without end, made at the first start."""
        path = folder / "secrets.json"
        try:
            secrets = msgspec.json.decode(path.read_bytes(), type=Secrets)
        except (FileNotFoundError, msgspec.DecodeError):
            secrets = Secrets(operator_token=new_token(), ticket=new_token())
            _write_private(path, msgspec.json.encode(secrets))
        now = self._clock.wall()

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM auth_tokens WHERE role = 'operator'")
            _insert_token(connection, secrets.operator_token, "operator", "operator", now)
            connection.execute(
                "INSERT OR IGNORE INTO auth_tickets VALUES (?, NULL, NULL)",
                (_digest(secrets.ticket),),
            )

        await self._database.write(write)
        self._tokens = {
            hash_: identity for hash_, identity in self._tokens.items()
            if identity.role != "operator"
        }  # fmt: skip
        self._tokens[_digest(secrets.operator_token)] = Identity("operator", "operator")
        return secrets

    async def create_ticket(self, *, uses: int | None = None, valid_s: float | None = None) -> str:
        """Return a new ticket for `uses` machines (None: any number) and `valid_s` seconds."""
        secret = new_token()
        expires = None if valid_s is None else self._clock.wall() + valid_s
        await self._database.write(
            lambda connection: connection.execute(
                "INSERT INTO auth_tickets VALUES (?, ?, ?)", (_digest(secret), uses, expires)
            )
        )
        return secret

    async def redeem(self, secret: str, *, name: str, source: str = "") -> tuple[str, str]:
        """Let a machine in; return its node id and its token.

        The id is `name`, with a suffix when another machine has that name already.

        Raises:
            AuthError: the ticket is wrong, used up or expired.
            ConfigError: the name cannot be a node id.
        """
        self._limit.check(source)
        check_name("node name", name)
        now = self._clock.wall()
        token = new_token()

        def write(connection: sqlite3.Connection) -> str:
            _use_ticket(connection, _digest(secret), now)
            node = name
            while connection.execute(
                "SELECT 1 FROM auth_tokens WHERE role = 'node' AND name = ?", (node,)
            ).fetchone():
                node = f"{name[:58]}-{new_suffix()}"
            _insert_token(connection, token, "node", node, now)
            return node

        try:
            node = await self._database.write(write)
        except AuthError:
            self._limit.failed(source)
            raise
        self._tokens[_digest(token)] = Identity("node", node)
        return node, token

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

    async def revoke_node(self, node: str) -> None:
        """Shut a machine out; it needs a ticket to come back."""
        await self._revoke(Identity("node", node))

    async def _revoke(self, identity: Identity) -> None:
        whose = (identity.role, identity.name)
        self._tokens = {
            hash_: other for hash_, other in self._tokens.items()
            if (other.role, other.name) != whose
        }  # fmt: skip
        if identity.role == "job":
            self._newest = {k: v for k, v in self._newest.items() if k[0] != identity.name}

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM auth_launches WHERE hash IN"
                " (SELECT hash FROM auth_tokens WHERE role = ? AND name = ?)",
                whose,
            )
            connection.execute("DELETE FROM auth_tokens WHERE role = ? AND name = ?", whose)

        await self._database.write(write)

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
        if token:  # who comes without one is not guessing
            self._limit.check(source)
            self._limit.failed(source)
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
        return self._limit.reached(source)

    def may_open_session(self, identity: Identity, session: str) -> bool:
        """Return whether this identity may speak under a session address."""
        if identity.role == "operator":
            return True
        if identity.role == "node":
            return session == identity.name
        job, _, member = session.partition("/")
        return job == identity.name and bool(member) and identity.member in ("", member)


def may_use_queue(identity: Identity, queue: str) -> bool:
    """Return whether this identity may put into and claim from a queue.

    A node has `node/ITS-ID`, a job the queues whose names start with `ITS-ID/`.
    """
    if identity.role == "operator":
        return True
    if identity.role == "node":
        return queue == f"node/{identity.name}"
    return queue.startswith(f"{identity.name}/")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _insert_token(
    connection: sqlite3.Connection, token: str, role: str, name: str, now: float
) -> None:
    connection.execute(
        "INSERT INTO auth_tokens VALUES (?, ?, ?, ?)", (_digest(token), role, name, now)
    )


def _use_ticket(connection: sqlite3.Connection, digest: str, now: float) -> None:
    """Use a ticket once.

    Raises:
        AuthError: it is unknown, expired or used up; says which.
    """
    row = connection.execute(
        "SELECT hash, uses_left, expires FROM auth_tickets WHERE hash = ?", (digest,)
    ).fetchone()
    remedy = "ask for a fresh one: `atoll ticket` on the hub's machine prints it"
    if row is None or not hmac.compare_digest(row[0], digest):
        raise AuthError("this ticket is unknown to the hub", remedy=remedy)
    _, uses_left, expires = row
    if expires is not None and expires <= now:
        raise AuthError("this ticket has expired", remedy=remedy)
    if uses_left is not None and uses_left <= 0:
        raise AuthError("this ticket is used up", remedy=remedy)
    connection.execute(
        "UPDATE auth_tickets SET uses_left = uses_left - 1 WHERE hash = ?", (digest,)
    )


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, or keep the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{new_suffix()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
