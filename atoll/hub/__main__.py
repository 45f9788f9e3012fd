"""Run a hub: `python -m atoll.hub`. Prints one JSON line when it accepts connections."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from pathlib import Path

from atoll.errors import AtollError
from atoll.hub.app import HubOptions
from atoll.hub.jobs.retention import RetentionRules
from atoll.hub.options import apply_tuning
from atoll.hub.server import HubServer, run


def parse(arguments: list[str]) -> HubOptions:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m atoll.hub", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: a free one")
    parser.add_argument("--data", type=Path, required=True, help="folder of the hub's state")
    parser.add_argument("--jobs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--advertise", default="", help="host in the ticket")
    parser.add_argument("--prefix", default="", help="path below which a proxy serves the hub")
    parser.add_argument(
        "--announce", action="store_true", help="announce the hub on the local network"
    )
    parser.add_argument("--tls", default="auto", help="auto, on, off, or CERTIFICATE:KEY files")
    parser.add_argument(
        "--trust-proxy", action="append", default=[], help="address of a reverse proxy"
    )
    parser.add_argument("--queue", default="", help="server of users' queues: nats://... or @FILE")
    parser.add_argument("--otlp", default="", help="OpenTelemetry collector")
    parser.add_argument("--hooks", type=Path, default=None, help="file of alarm hooks")
    parser.add_argument(
        "--copies", type=Path, action="append", default=[],
        help="folder for copies of checkpoints",
    )  # fmt: skip
    parser.add_argument("--keep-ended", type=float, help="days from a job's end to its deletion")
    parser.add_argument(
        "--keep-resumable", type=float, help="the same for jobs that could be resumed"
    )
    parser.add_argument("--ticket-uses", type=int, default=None, help="limit of the ticket")
    parser.add_argument(
        "--no-reducers", action="store_true", help="run reducers on nodes, not beside the hub"
    )
    parser.add_argument(
        "--restart-grace",
        type=float,
        default=HubOptions.restart_grace_s,
        help="seconds that members have to reconnect after a restart",
    )
    parser.add_argument(
        "--from",
        dest="backup",
        type=Path,
        default=None,
        help="backup to restore if the data folder is empty",
    )
    args = parser.parse_args(arguments)
    return HubOptions(
        data=args.data,
        jobs=args.jobs,
        host=args.host,
        port=args.port,
        advertise=args.advertise,
        prefix=args.prefix,
        announce=args.announce or None,
        ticket_uses=args.ticket_uses,
        queue=args.queue,
        tls=args.tls,
        trust_proxy=tuple(args.trust_proxy),
        reducers=not args.no_reducers,
        hooks=args.hooks,
        copies=tuple(args.copies),
        keeping=RetentionRules(ended=args.keep_ended, resumable=args.keep_resumable),
        otlp=args.otlp,
        restart_grace_s=args.restart_grace,
        restore_from=args.backup,
    )


def main(arguments: list[str]) -> int:
    """Run a hub until SIGTERM or SIGINT; return the exit status."""
    options = parse(arguments)
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    apply_tuning()
    server = HubServer(options)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())

    def ready() -> None:
        line = {
            "url": server.url,
            "port": server.port,
            "ticket": server.ticket,
            "operator_token": server.operator_token,
            "ca": server.ca,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    try:
        run(server, on_ready=ready)
    except AtollError as error:
        sys.stderr.write(f"atoll hub: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
