"""Tickets: what one machine prints and the others are started with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.net.unreachable import at

FORM = "atoll://HOST:PORT/SECRET~FINGERPRINT"

OPEN = "tls"
"""In place of a fingerprint: the hub's certificate is of an authority that this machine trusts."""

_TICKET = re.compile(
    r"atoll://(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s:/\[\]@?#]+)):(?P<port>\d{1,5})"
    r"(?P<prefix>(?:/[A-Za-z0-9_.-]+)*)"
    r"/(?P<secret>[A-Za-z0-9_-]+)(?:~(?P<mark>[0-9a-f]{40}|tls))?/?"
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a hub is, the secret that lets a machine or a person in, and how to know the hub."""

    host: str
    port: int
    secret: str
    prefix: str = ""
    """Path below which the hub is, e.g. `/atoll`; empty or without a slash at its end."""
    mark: str = ""
    """Fingerprint of the hub's authority, or `tls`; empty: the hub speaks plain HTTP."""

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken there."""
        return bool(self.mark)

    @property
    def fingerprint(self) -> str:
        """Of the hub's own authority; empty: there is none to compare with."""
        return "" if self.mark == OPEN else self.mark

    @property
    def url(self) -> str:
        """The hub's URL, http(s)://HOST:PORT[/PREFIX]."""
        return f"{'https' if self.secure else 'http'}://{at(self.host, self.port)}{self.prefix}"

    def __str__(self) -> str:
        mark = f"~{self.mark}" if self.mark else ""
        return f"atoll://{at(self.host, self.port)}{self.prefix}/{self.secret}{mark}"


def parse_ticket(text: str) -> Ticket:
    """Return the ticket that a person pasted; blanks around it do not matter.

    Raises:
        ConfigError: it is not of the form atoll://HOST:PORT[/PREFIX]/SECRET[~FINGERPRINT].
    """
    match = _TICKET.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ConfigError(
            "this is not a ticket",
            given=repr(_without_secret(text)),
            expected=FORM,
            remedy="copy the whole line that `atoll hub` or `atoll ticket new` prints",
        )
    return Ticket(
        match["six"] or match["host"],
        int(match["port"]),
        match["secret"],
        prefix=match["prefix"],
        mark=match["mark"] or "",
    )


def _without_secret(text: str) -> str:
    """Return what a person gave, for an error message, without what may be a secret."""
    front, slash, end = text.strip()[:200].rpartition("/")
    return f"{front}{slash}{end[:4]}..." if len(end) > 8 else text.strip()[:200]
