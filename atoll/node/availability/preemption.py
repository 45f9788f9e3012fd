"""Whether this machine is about to be taken away: a file that appears, or an address that says so.

Clouds announce the end of a spot machine half a minute to two minutes ahead, under an address that
only the machine itself can read, or through an agent of theirs that can touch a file. Both kinds
are asked every second or so; what follows from the answer is the agent's affair.
"""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ConfigError

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Pause between two looks."""

ANSWER_TIMEOUT_S = 2.0

_MAX_ANSWER_BYTES = 4096
_NOT_YET = frozenset({b"FALSE", b"NONE"})
"""Bodies of a 200 by which some services say that there is no notice."""

_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""Metadata services answer only those who send theirs; others do not mind them."""


@dataclass(frozen=True, slots=True)
class PreemptionNotices:
    """Where a preemption notice would appear."""

    file: Path | None = None
    """A notice is there while this file is."""
    url: str = ""
    """A notice is there while this answers 200 (with any body but FALSE or NONE)."""

    def __bool__(self) -> bool:
        """Return whether there is anything to look at."""
        return self.file is not None or bool(self.url)

    def read(self) -> str | None:
        """Return why this machine goes away, "" if it does not, None if it cannot be told now.

        May take up to `ANSWER_TIMEOUT_S`.
        """
        if self.file is not None and self.file.exists():
            return f"the file {self.file} is there"
        if not self.url:
            return ""
        told = _ask(self.url)
        if told is None:
            return None
        return f"{self.url} gave notice" if told else ""


def check_url(url: str) -> str:
    """Return the address of a notice as given.

    Raises:
        ConfigError: it is not one that can be asked.
    """
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(
            "the address of the preemption notice cannot be asked",
            given=url,
            expected="http://... or https://...",
        )
    return url


def _ask(url: str) -> bool | None:
    """Return whether there is a notice; None: nobody answered, which says nothing either way."""
    # No proxy: the address means something on this machine only.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=_HEADERS)
    try:
        with opener.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
            body: bytes = answer.read(_MAX_ANSWER_BYTES)
            return answer.status == 200 and body.strip().upper() not in _NOT_YET
    except urllib.error.HTTPError as refused:
        refused.close()
        return None if refused.code >= 500 else False
    except (OSError, ValueError) as error:
        log.debug("the address of the preemption notice did not answer: %s", error)
        return None
