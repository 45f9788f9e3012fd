"""Calls of the hub's REST interface by which jobs that have ended are deleted."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from atoll.net.rest import Rest

DELETION_S = 60.0
"""Time for the answer to a deletion: the hub waits a while for what is left to go."""


class DeletionCalls:
    """The part of a client of the hub that is about deleting jobs."""

    _rest: Rest

    def job_size(self, job: str) -> dict[str, Any]:
        """Return what would go with a job: `files`, `queue_items`, and bytes of each kind."""
        return dict(self._rest.json("GET", f"{_path(job)}/size", timeout=DELETION_S))

    def delete_job(self, job: str, *, keep_files: bool = False) -> dict[str, Any]:
        """Delete a job that has ended, and what is left of it.

        Args:
            job: Which.
            keep_files: Leave its folder at the hub as it is.

        Returns:
            What :meth:`job_size` told, and `finished`: False when the rest goes a little later.

        Raises:
            HubError: it has not ended, or there is no such job.
        """
        params = {"keep_files": int(keep_files)}
        answer = self._rest.json("DELETE", _path(job), params=params, timeout=DELETION_S)
        return dict(answer)


def _path(job: str) -> str:
    return f"/api/jobs/{quote(job, safe='')}"
