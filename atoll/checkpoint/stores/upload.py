"""Upload parts of a checkpoint from memory to the hub, without torch or temporary files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from urllib.parse import quote

import httpx

from atoll.checkpoint.files import BLOCK_BYTES, Moment, Written, unobserved
from atoll.errors import CheckpointError, CheckpointMissing, HubUnreachable
from atoll.net.endpoint import PLAIN, HubEndpoint
from atoll.net.http.client import SLOW_ANSWER_S
from atoll.net.http.http import HttpSession
from atoll.net.line_use import GiveWay
from atoll.net.retry import backoff
from atoll.wire.manifest import MANIFEST_NAME, checkpoint_folder

TIMEOUT_S = 30.0
SENT_BYTES = 64 * 2**10
"""What an upload that gives way sends at once: a tenth of a second of a slow line."""


class Upload:
    """Uploads one job's files to the hub.

    Args:
        url: Of the hub.
        token: Of the job.
        job: Which job.
        line: File of the `LineUse` to which an upload gives way; empty: to none.
        pause: Waits before a retry; raises to give up.
        moment: Called at every point of an upload; for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str,
        job: str,
        endpoint: HubEndpoint = PLAIN,
        line: str = "",
        pause: Callable[[float], None],
        moment: Moment = unobserved,
    ) -> None:
        self._rest = HttpSession(url, token, endpoint=endpoint, timeout_s=TIMEOUT_S)
        self._job, self._line = job, line
        self._pause = pause
        self._moment = moment

    def put(self, round_: int, name: str, data: memoryview) -> Written:
        """Make sure that a part is at the hub, and return its hash and size.

        A part that is there with this hash is not sent again. A part of a published checkpoint is
        never overwritten.

        Raises:
            CheckpointError: the round is published with other content.
            StorageFull: the hub's disk is full.
            AtollError: from `pause` while the hub does not answer, or from the hub.
        """
        digest = hashlib.sha256()
        for block in _blocks(data):
            digest.update(block)
        written = Written(digest.hexdigest(), data.nbytes)
        self._moment(f"{name} hashed")
        for pause_s in backoff():
            try:
                self._put(f"{checkpoint_folder(round_)}/{name}", data, written)
                break
            except HubUnreachable:
                self._pause(pause_s)
        self._moment(f"{name} uploaded")
        return written

    def close(self) -> None:
        """Close the connections."""
        self._rest.close()

    def _put(self, path: str, data: memoryview, written: Written) -> None:
        if self._stat(path) == written:
            return
        folder, _, name = path.rpartition("/")
        if self._stat(f"{folder}/{MANIFEST_NAME}") is not None:
            raise CheckpointError(
                f"{folder} is published at the hub with another {name}",
                given=f"SHA-256 {written.sha256[:16]}...",
                expected="the same part, or a round that is not published yet",
            )
        self._rest.call(
            "PUT",
            self._url(path),
            content=self._giving_way(data),
            headers={"X-Sha256": written.sha256, "Content-Length": str(written.nbytes)},
            timeout=max(TIMEOUT_S, SLOW_ANSWER_S),
        )

    def _giving_way(self, data: memoryview) -> Iterator[bytes]:
        way = GiveWay(self._line)
        for block in _blocks(data, SENT_BYTES if self._line else BLOCK_BYTES):
            way.wait()
            yield block

    def _stat(self, path: str) -> Written | None:
        absent = CheckpointMissing("the hub has no such file", given=path)
        try:
            answer: httpx.Response = self._rest.call("HEAD", self._url(path), absent=absent)
        except CheckpointMissing:
            return None
        headers = answer.headers
        return Written(str(headers.get("X-Sha256", "")), int(headers.get("Content-Length", "0")))

    def _url(self, path: str) -> str:
        return f"/api/jobs/{quote(self._job, safe='')}/files/{quote(path)}"


def _blocks(data: memoryview, nbytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    for start in range(0, data.nbytes, nbytes):
        yield bytes(data[start : start + nbytes])
