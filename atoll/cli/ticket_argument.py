"""Read a ticket argument: the text itself, `@FILE`, or ATOLL_TICKET."""

from __future__ import annotations

import time
from pathlib import Path

from atoll import config
from atoll.errors import ConfigError
from atoll.net.endpoint import Ticket, parse_ticket

WAIT_S = 120.0
"""How long a file may take to appear: containers start before the hub has written it."""

_LOOK_S = 0.5


def read_ticket(argument: str, *, wait_s: float = WAIT_S) -> Ticket | None:
    """Return the ticket given on the command line or in the environment.

    Args:
        argument: A ticket, `@PATH` of a file with one, or empty for ATOLL_TICKET.
        wait_s: How long to wait for the file.

    Returns:
        None when there is none.

    Raises:
        ConfigError: it is not a ticket, or the file did not appear.
    """
    text = argument or config.take_ticket()
    if not text:
        return None
    if not text.startswith("@"):
        return parse_ticket(text)
    path = Path(text[1:])
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return parse_ticket(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    "there is no ticket in this file",
                    given=f"{path} ({error})",
                    expected="the line that `atoll hub --ticket-file` or `atoll ticket new` wrote",
                ) from error
        time.sleep(_LOOK_S)
