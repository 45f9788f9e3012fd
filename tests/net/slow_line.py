"""Inside a lab: relay some megabytes, ask the hub things meanwhile, print each wait in seconds."""

from __future__ import annotations

import sys
import threading
import time

from atoll.errors import AtollError
from atoll.net.dispatcher import Inbox
from atoll.net.endpoint import HubEndpoint
from atoll.net.handshake import make_hello
from atoll.net.sync_link import connect
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import Beat
from tests.patience import PATIENCE_S


def drain(inbox: Inbox) -> None:
    """Read until the link is closed."""
    try:
        while True:
            inbox.receive(deadline=time.monotonic() + PATIENCE_S)
    except AtollError:
        return


def main(url: str, token: str, ca: str, nbytes: int) -> None:
    """Relay `nbytes` from one session of this process to another."""
    endpoint = HubEndpoint(ca=ca)
    deadline = time.monotonic() + PATIENCE_S
    with (
        connect(url, make_hello("slow/reducer", token), endpoint=endpoint) as receiver,
        connect(url, make_hello("slow/w0", token), endpoint=endpoint) as sender,
    ):
        inbox = receiver.subscribe()
        reader = threading.Thread(target=drain, args=(inbox,))
        reader.start()
        parts = ((b"", bytes(CHUNK_BYTES)) for _ in range(nbytes // CHUNK_BYTES))
        sending = sender.relay_later("slow/reducer", parts, deadline=deadline)
        while not sending.done():
            started = time.perf_counter()
            sender.request(Beat(), timeout_s=PATIENCE_S)
            sys.stdout.write(f"{time.perf_counter() - started}\n")
            time.sleep(0.05)
        sending.result()
        inbox.close()
        reader.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
