"""Calls of the hub's REST interface by which the machines of an island find each other."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from atoll.errors import HubError
from atoll.net.rest import Rest
from atoll.wire.messages import Gate


class GateCalls:
    """The part of a client of the hub that is about the gates of islands."""

    _rest: Rest

    def open_gate(self, job: str, member: str, gate: Gate) -> None:
        """Tell the hands of this member where its island's first machine awaits them.

        The hub forgets it when it restarts, and when the member is launched again.

        Raises:
            AuthError: the token is not that of this member.
            HubError: the job does not run.
        """
        self._rest.call(
            "PUT",
            _path(job, member),
            content=msgspec.json.encode(gate),
            headers={"Content-Type": "application/json"},
        )

    def gate(self, job: str, member: str) -> Gate | None:
        """Return where a member's island awaits its hands; None: nowhere, for now.

        Raises:
            AuthError: the token is that of neither this member nor one of its hands.
        """
        absent = HubError("no such gate", given=f"{job}/{member}")
        try:
            response = self._rest.call("GET", _path(job, member), absent=absent)
        except HubError as error:
            if error is absent:
                return None
            raise
        return msgspec.json.decode(response.content, type=Gate)


def _path(job: str, member: str) -> str:
    return f"/api/jobs/{quote(job, safe='')}/gates/{quote(member, safe='')}"
