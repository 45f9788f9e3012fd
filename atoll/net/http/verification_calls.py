"""REST calls of verified jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from atoll.errors import HubError
from atoll.net.http.http import HttpSession
from atoll.net.http.streams import blocks, write_verified

TRANSFER_S = 120.0
"""Longest wait for the hub's answer to a state that it has to digest."""


class VerificationCalls:
    """Verified jobs: checks of members, and the states that members upload for them."""

    _rest: HttpSession

    def verification(self, job: str) -> dict[str, Any]:
        """Return members, open challenges and settled ones; raises HubError if there are none."""
        found: dict[str, Any] = self._rest.json("GET", _verification_path(job))
        return found

    def put_state(self, job: str, challenge: int, position: int, source: Path) -> None:
        """Upload the state after `position` steps.

        Raises:
            HubError: no challenge waits for it.
            WireError: it is not the state that was committed to.
        """
        self._rest.call(
            "PUT",
            _verification_path(job, challenge, position),
            content=blocks(source),
            headers={"Content-Length": str(source.stat().st_size)},
            timeout=TRANSFER_S,
        )

    def get_state(self, job: str, challenge: int, position: int, target: Path) -> None:
        """Download a state that a task begins with.

        Raises:
            HubError: there is no such task, or no member has uploaded it.
        """
        path = _verification_path(job, challenge, position)
        absent = HubError("no member has uploaded this state", given=path)
        with self._rest.stream("GET", path, absent=absent) as response:
            write_verified(target, response.iter_bytes(1 << 20), sha256="")


def _verification_path(job: str, *parts: int) -> str:
    ends = "".join(f"/{part}" for part in parts)
    return f"/api/jobs/{quote(job, safe='')}/verification{ends}"
