"""`python -m atoll.node`: an agent in the foreground, for embedded runs, services and tests."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from atoll import config
from atoll.errors import AtollError
from atoll.net.endpoint import parse_ticket
from atoll.node.agent.options import NodeOptions
from atoll.node.agent.serve import run_node
from atoll.node.availability.preemption import PreemptionNotices, check_url
from atoll.node.identity.identity import Identity


def main() -> int:
    """Run an agent until it is asked to leave; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m atoll.node", description=__doc__)
    parser.add_argument("--ticket", default="", help="default: the variable ATOLL_TICKET")
    parser.add_argument("--home", type=Path, default=None, help="folder of this agent")
    parser.add_argument("--name", default="", help="start of the node's id")
    parser.add_argument("--slots", type=int, default=1, help="workers at once")
    parser.add_argument("--no-measure", action="store_true", help="skip the matmul trial")
    parser.add_argument(
        "--preempt-file", type=Path, default=None, help="return work while this file exists"
    )
    parser.add_argument("--preempt-url", default="", help="return work while this URL answers 200")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    try:
        run_node(
            NodeOptions(
                ticket=parse_ticket(arguments.ticket or config.take_ticket()),
                home=(arguments.home or config.home()).resolve(),
                name=arguments.name,
                slots=arguments.slots,
                measure=not arguments.no_measure,
                notices=PreemptionNotices(arguments.preempt_file, check_url(arguments.preempt_url)),
            ),
            on_ready=_tell,
        )
    except AtollError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _tell(me: Identity) -> None:
    sys.stdout.write(json.dumps({"node": me.node, "hub": me.hub}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
