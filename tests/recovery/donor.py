"""A donor as a process of its own, so that it can be killed: `python -m tests.recovery.donor`."""

from __future__ import annotations

import json
import sys

from atoll.gate import Gate
from atoll.ids import session_id
from atoll.net.sync_link import connect
from atoll.recovery import StateServer
from tests.recovery.world import LOCAL, Model


def main() -> None:
    """Serve the state that stdin describes until stdin ends."""
    given = json.loads(sys.stdin.readline())
    job, member, token = given["job"], given["member"], given["token"]
    with connect(given["url"], session=session_id(job, member), token=token) as link:
        address = LOCAL if given["direct"] else ""
        with StateServer(job=job, token=token, address=address, link=link) as server:
            server.offer(Model(member, **given["model"]), still=Gate().still)
            sys.stdout.write(json.dumps(server.dial) + "\n")
            sys.stdout.flush()
            sys.stdin.read()


if __name__ == "__main__":
    main()
