"""Follows what the processes of an embedded run print, from its files, without its hub."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from atoll.cli.watch import ENDED

_STATES = frozenset({*ENDED, "waiting", "running"})


class LocalOutput:
    """The output of one job of an embedded hub, read on from where it was read last."""

    def __init__(self, folder: Path, *, job_folder: Path, member: str = "") -> None:
        """Read nothing yet.

        Args:
            folder: Of the embedded hub and its nodes.
            job_folder: The job's own folder.
            member: One member only; empty: all.
        """
        self._folder = folder
        self._job_folder = job_folder
        self._pattern = f"node*/jobs/{job_folder.name}/{member or '*'}/output.log"
        self._read: dict[Path, int] = {}

    def lines(self, *, last: bool = False) -> list[dict[str, Any]]:
        """Return the lines printed since the last call; `last`: an unfinished one too."""
        found: list[dict[str, Any]] = []
        for path in sorted(self._folder.glob(self._pattern)):
            with path.open("rb") as file:
                start = self._read.get(path, 0)
                if path.stat().st_size < start:  # the file was turned over
                    start = 0
                file.seek(start)
                block = file.read()
            whole, newline, _ = block.rpartition(b"\n")
            if last and not block.endswith(b"\n"):
                whole, newline = block, b""
            self._read[path] = start + len(whole) + len(newline)
            if whole or newline:
                text = whole.decode("utf-8", "replace")
                member = path.parent.name
                found += [{"member": member, "text": line} for line in text.split("\n")]
        return found

    def ended(self) -> bool:
        """Return whether nothing will be printed any more: the job is over, or its hub is gone."""
        return self._state() in ENDED or not self._hub_runs()

    def _state(self) -> str:
        """Return the state of the job that its events tell."""
        try:
            lines = (self._job_folder / "events.jsonl").read_text("utf-8").splitlines()
        except OSError:
            return ""
        for line in reversed(lines):
            try:
                kind = str(json.loads(line).get("kind"))
            except ValueError:  # a line that is being written
                continue
            if kind in _STATES:
                return kind
        return ""

    def _hub_runs(self) -> bool:
        """Return whether somebody holds the lock of the hub's database."""
        path = self._folder / "hub" / "hub.sqlite.lock"
        if not path.exists():
            return False
        lock = sqlite3.connect(path, timeout=0.0, isolation_level=None)
        try:
            lock.execute("BEGIN IMMEDIATE")
            lock.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return True
        finally:
            lock.close()
        return False
