"""`python -m atoll.reducer`: the reducer process of one job.

It reads its job, token and hub from the environment, as every worker does.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
import threading
from collections.abc import Sequence

from atoll.config import worker_environment
from atoll.errors import AtollError, ConfigError
from atoll.ids import session_id
from atoll.net.endpoint import endpoint_of
from atoll.net.handshake import make_hello
from atoll.net.sync_link import connect

log = logging.getLogger("atoll.reducer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a stop signal or until the hub stays unreachable; return the exit status."""
    gc.disable()  # the objects of torch live on: keep every collection from traversing them
    from atoll.reducer.server import AWAY_S

    gc.freeze()
    gc.enable()
    parser = argparse.ArgumentParser(prog="python -m atoll.reducer", description=__doc__)
    parser.add_argument("--hub", default="", help="URL of the hub, instead of ATOLL_HUB")
    parser.add_argument(
        "--away-s", type=float, default=AWAY_S, help="exit after this long without the hub"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return _serve(options.hub, away_s=options.away_s, stop=stop)
    except AtollError as error:
        log.error("%s", error)
        return error.exit_code


def _serve(hub: str, *, away_s: float, stop: threading.Event) -> int:
    from atoll.reducer.server import Reducer

    worker = worker_environment()
    if worker is None:
        raise ConfigError(
            "a reducer was started without a job", given="no ATOLL_JOB in the environment",
            remedy="the hub or a node agent starts it; ATOLL_* are set as for workers",
        )  # fmt: skip
    session = session_id(worker.job, worker.member)
    serving: list[Reducer] = []
    with connect(
        hub or worker.hub,
        make_hello(session, worker.token),
        endpoint=endpoint_of(worker),
        stats=lambda: serving[0].figures() if serving else {},
        patient=True,
    ) as link:

        def limits() -> dict[str, int]:
            return link.welcome.limits if link.welcome is not None else {}

        log.info("reducing for job %s", worker.job)
        serving.append(Reducer(link, job=worker.job, away_s=away_s, limits=limits))
        serving[0].serve(stop=stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
