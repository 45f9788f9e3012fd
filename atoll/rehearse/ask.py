"""`python -m atoll.rehearse.ask`: one request to the hub of a rehearsal, inside its namespace.

The operator's token comes on standard input.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from atoll.errors import AtollError, HubError
from atoll.net.endpoint import HubEndpoint
from atoll.net.http.client import HubClient

GRACE_S = 2.0


def main(words: list[str]) -> int:
    """Do what the words say; return the exit status."""
    url, ca, verb, *rest = words
    try:
        with HubClient(url, sys.stdin.read(), endpoint=HubEndpoint(ca=ca)) as client:
            if verb == "submit":
                sys.stdout.write(_submit(client, *rest) + "\n")
            else:
                client.stop(rest[0], grace_s=GRACE_S)
    except AtollError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 1
    return 0


def _submit(client: HubClient, members: str, wait_s: str, path: str) -> str:
    deadline = time.monotonic() + float(wait_s)
    while (here := len(client.nodes())) < int(members):
        if time.monotonic() > deadline:
            raise HubError("not all machines have joined in time", given=f"{here} of {members}")
        time.sleep(0.1)
    return client.submit(Path(path).read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
