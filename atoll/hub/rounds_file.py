"""`rounds.json` in a job's folder: where the time of its newest rounds went, for the report."""

from __future__ import annotations

import json
import logging
import sqlite3
from pathlib import Path

from atoll.hub.timeline import row_view
from atoll.hub.timelines import find_passed
from atoll.hub.worth import worth

log = logging.getLogger(__name__)

NAME = "rounds.json"
NEWEST = 300


def write_rounds(connection: sqlite3.Connection, job: str, *, folder: Path, alone: bool) -> None:
    """Write the file, whole or not at all (in the database's reading thread).

    A disk that is full costs the report a chart and nothing else.
    """
    rounds = find_passed(connection, job, newest=NEWEST)
    if not rounds or not folder.is_dir():
        return
    rows = [
        {
            "round": one.round, "time": one.time, "seconds": one.seconds, "route": one.route,
            "contributors": one.contributors, "timeline": [row_view(row) for row in one.rows],
        }
        for one in rounds
    ]  # fmt: skip
    path = folder / NAME
    scratch = path.with_name(NAME + ".part")
    try:
        scratch.write_text(
            json.dumps({"rounds": rows, "worth": worth(rounds, alone=alone)}) + "\n",
            encoding="utf-8",
        )
        scratch.replace(path)
    except OSError as error:
        log.warning("%s: %s was not written: %s", job, NAME, error)
