"""Join tickets: what one machine prints and the others are started with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.net.unreachable import at

FORM = "atoll://HOST:PORT/SECRET"

_TICKET = re.compile(
    r"atoll://(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s:/\[\]@?#]+)):(?P<port>\d{1,5})"
    r"/(?P<secret>[A-Za-z0-9_~.-]+)/?"
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a hub is, and the secret that lets a machine in."""

    host: str
    port: int
    secret: str

    @property
    def url(self) -> str:
        """The hub's URL, http://HOST:PORT."""
        return f"http://{at(self.host, self.port)}"

    def __str__(self) -> str:
        return f"atoll://{at(self.host, self.port)}/{self.secret}"


def parse_ticket(text: str) -> Ticket:
    """Return the ticket that a person pasted; blanks around it do not matter.

    Raises:
        ConfigError: it is not of the form atoll://HOST:PORT/SECRET.
    """
    match = _TICKET.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ConfigError(
            "this is not a join ticket",
            given=repr(text),
            expected=FORM,
            remedy="copy the whole line that `atoll hub` prints when it starts",
        )
    return Ticket(match["six"] or match["host"], int(match["port"]), match["secret"])
