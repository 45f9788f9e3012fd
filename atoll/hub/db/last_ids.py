"""The last row id of every job in memory: a reader that has all rows costs no query."""

from __future__ import annotations


class LastIdCache:
    """The last row id by job. A job without an entry has to be looked up."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def stored(self, job: str, id_: int) -> None:
        """Remember that a row with this id is on disk."""
        self._ids[job] = max(id_, self._ids.get(job, 0))

    def nothing_after(self, job: str, after: int) -> None:
        """Remember that a look found no row above this id."""
        self._ids.setdefault(job, after)

    def newest(self, job: str) -> int:
        """Return the last id as far as is known; 0: nothing is known."""
        return self._ids.get(job, 0)

    def forget(self, job: str) -> None:
        """Drop the entry of a job."""
        self._ids.pop(job, None)

    def is_all(self, job: str, after: int) -> bool:
        """Return whether no row above this id is there, as far as is known without looking."""
        known = self._ids.get(job)
        return known is not None and known <= after
