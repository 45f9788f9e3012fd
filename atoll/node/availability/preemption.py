"""Preemption notices: a file that appears, or a URL that answers.

Clouds announce the end of a spot machine 30 seconds to two minutes in advance, at a URL that only
the machine itself can read, or through an agent that can create a file. Both are polled.
"""

from __future__ import annotations

import http.client
import logging
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ConfigError

log = logging.getLogger(__name__)

POLL_S = 1.0

ANSWER_TIMEOUT_S = 2.0

_MAX_ANSWER_BYTES = 4096
_NOT_YET = frozenset({b"FALSE", b"NONE"})
"""Bodies of a 200 by which some services say that there is no notice."""

_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""Required by the metadata services of Google and Azure; ignored by others."""


@dataclass(frozen=True, slots=True)
class PreemptionNotices:
    """Where a preemption notice would appear."""

    file: Path | None = None
    """A notice exists while this file does."""
    url: str = ""
    """A notice exists while this answers 200 (with any body but FALSE or NONE)."""

    def __bool__(self) -> bool:
        """Return whether any source is configured."""
        return self.file is not None or bool(self.url)

    def read(self) -> str | None:
        """Return the reason of a notice, "" without one, None if unknown; takes up to 2 s."""
        if self.file is not None and self.file.exists():
            return f"the file {self.file} is there"
        if not self.url:
            return ""
        answer = _ask(self.url)
        if answer is None:
            return None
        return f"{self.url} gave notice" if answer else ""


def check_url(url: str) -> str:
    """Return the URL of a notice as given; raises ConfigError if it is not http(s)."""
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(
            "the URL of the preemption notice is not valid",
            given=url,
            expected="http://... or https://...",
        )
    return url


def _ask(url: str) -> bool | None:
    """Return whether there is a notice; None without an answer."""
    # No proxy: the address is valid on this machine only.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=_HEADERS)
    try:
        with opener.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
            body: bytes = answer.read(_MAX_ANSWER_BYTES)
            return answer.status == 200 and body.strip().upper() not in _NOT_YET
    except urllib.error.HTTPError as refused:
        refused.close()
        return None if refused.code >= 500 else False
    except (OSError, ValueError, http.client.HTTPException) as error:
        log.debug("the URL of the preemption notice did not answer: %s", error)
        return None
