"""Checkpoints at the hub: parts are uploaded, then announced; the hub writes the manifest.

The hub publishes a checkpoint once every member of the round has announced its part, because only
the hub knows the round's members. A checkpoint can then be resumed on any machine.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from atoll.checkpoint.files import write_file
from atoll.checkpoint.format.part import Part, part_blocks, read_part
from atoll.checkpoint.stores.folder import missing
from atoll.checkpoint.stores.store import SavePoint, stamped
from atoll.errors import CheckpointMissing, HubUnreachable
from atoll.net.endpoint import PLAIN, HubEndpoint
from atoll.net.http.client import HubClient
from atoll.net.retry import backoff
from atoll.wire.manifest import MANIFEST_NAME, Manifest, checkpoint_folder
from atoll.wire.messages import CheckpointPart
from atoll.wire.part_check import check_part, open_manifest

T = TypeVar("T")


class HubStore:
    """A store at the hub; for one thread at a time.

    Args:
        client: Holds the job's token.
        job: Whose checkpoints.
        publish: Sends the announcement and returns whether the checkpoint is complete now.
        scratch: Local folder for parts in transit.
        retry_s: How long an unreachable hub is retried.
    """

    def __init__(
        self,
        client: HubClient,
        job: str,
        *,
        publish: Callable[[CheckpointPart], bool],
        scratch: Path,
        retry_s: float = 60.0,
    ) -> None:
        self._client = client
        self._job = job
        self._publish = publish
        self._scratch = scratch
        self._retry_s = retry_s

    @classmethod
    def reading(
        cls, url: str, token: str, job: str, *, endpoint: HubEndpoint = PLAIN, scratch: Path
    ) -> HubStore:
        """Return a read-only store."""

        def refuse(part: CheckpointPart) -> bool:
            raise RuntimeError(f"{part.name} was written to a read-only store")

        return cls(HubClient(url, token, endpoint=endpoint), job, publish=refuse, scratch=scratch)

    def close(self) -> None:
        """Close the connections to the hub."""
        self._client.close()

    def put(self, point: SavePoint, parts: Sequence[Part]) -> bool:
        """Upload and announce parts; return whether the checkpoint is complete now.

        The hub knows the expected members; those of `point` are not used.

        Raises:
            StorageFull: the disk of the hub, or of this machine, is full.
            HubUnreachable: the hub did not answer for `retry_s`.
            CheckpointCorrupt: what arrived is not what was sent.
        """
        published = self._is_published(point.round)
        if published:
            return True  # a job resumed from this very checkpoint and stopped again at once
        for part in stamped(parts, point)[1]:
            with self._folder() as folder:
                path = folder / part.name
                written = write_file(path, part_blocks(part.tensors, part.metadata))
                remote = f"{checkpoint_folder(point.round)}/{part.name}"
                self._upload(remote, path)
            announcement = CheckpointPart(
                round=point.round,
                step=point.step,
                name=part.name,
                sha256=written.sha256,
                nbytes=written.nbytes,
            )
            published = self._publish(announcement)
        return published

    def get(self, round_: int, *, names: Collection[str]) -> dict[str, Part]:
        """Return parts by name, checked against the manifest; names it does not list are absent.

        Raises:
            CheckpointMissing: there is no complete checkpoint of that round.
            CheckpointCorrupt: a part is missing, truncated or altered; it is named.
            HubUnreachable: the hub did not answer for `retry_s`.
        """
        manifest = self.manifest(round_)
        found = {}
        for entry in manifest.parts:
            if entry.name not in names:
                continue
            with self._folder() as folder:
                path = folder / entry.name
                self._fetch(f"{checkpoint_folder(round_)}/{entry.name}", path)
                check_part(path, entry, round_=round_)
                found[entry.name] = read_part(path)
        return found

    def manifest(self, round_: int) -> Manifest:
        """Return what a complete checkpoint consists of; raises as `get` does."""
        name = f"{checkpoint_folder(round_)}/{MANIFEST_NAME}"
        try:
            data = self._patiently(lambda: self._client.read_file(self._job, name))
        except CheckpointMissing:
            raise missing(round_, place=f"{name} at the hub", rounds=self._complete()) from None
        return open_manifest(data, round_=round_)

    def latest(self) -> int:
        """Return the round of the newest checkpoint whose manifest is at the hub, or -1."""
        return max(self._complete(), default=-1)

    def _is_published(self, round_: int) -> bool:
        name = f"{checkpoint_folder(round_)}/{MANIFEST_NAME}"
        return self._patiently(lambda: self._client.stat_file(self._job, name)) is not None

    def _complete(self) -> list[int]:
        listed = self._patiently(lambda: self._client.files(self._job))
        rounds = []
        for file in listed:
            folder, _, name = file.name.rpartition("/")
            digits = folder.removeprefix("checkpoints/round-")
            if name == MANIFEST_NAME and digits.isdigit():
                rounds.append(int(digits))
        return sorted(rounds)

    def _upload(self, remote: str, path: Path) -> None:
        self._patiently(lambda: self._client.put_file(self._job, remote, path))

    def _fetch(self, remote: str, path: Path) -> None:
        """Download a part; if the hub has lost it, `check_part` reports that."""
        try:
            self._patiently(lambda: self._client.get_file(self._job, remote, path))
        except CheckpointMissing:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """Yield a temporary folder."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._scratch, prefix="part-") as name:
            yield Path(name)

    def _patiently(self, call: Callable[[], T]) -> T:
        """Return the result of a call to the hub, retrying while it is unreachable."""
        deadline = time.monotonic() + self._retry_s
        for pause_s in backoff():
            try:
                return call()
            except HubUnreachable:
                if time.monotonic() + pause_s > deadline:
                    raise
                time.sleep(pause_s)
        raise AssertionError("backoff never ends")
