"""The hub's REST interface for synchronous programs: the command line, workers, checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from atoll.errors import CheckpointMissing, HubError, HubUnreachable
from atoll.ids import new_token
from atoll.net.endpoint import PLAIN, HubEndpoint
from atoll.net.http.calls import AccessCalls, DeletionCalls, QueueCalls, RendezvousCalls
from atoll.net.http.http import HttpSession
from atoll.net.http.streams import (
    BLOCK_BYTES,
    Progress,
    blocks,
    check_hash,
    measure,
    with_progress,
    write_verified,
)

SUBMIT_PAUSES_S = (0.5, 1.5)
"""Before a submission that was not answered is sent again."""

SLOW_ANSWER_S = 120.0
"""Time for answers that the hub gives only when a whole file is safe on its disk."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a job at the hub; `sha256` is empty where the hub does not know it."""

    name: str
    nbytes: int
    sha256: str


class HubClient(AccessCalls, DeletionCalls, RendezvousCalls, QueueCalls):
    """A client of one hub, for one thread at a time; close it, or use `with`.

    Every method raises HubUnreachable when nobody answers, and otherwise the error that the hub
    answered with.
    """

    def __init__(
        self, url: str, token: str = "", *, endpoint: HubEndpoint = PLAIN, timeout_s: float = 30.0
    ) -> None:
        """Open nothing yet.

        Args:
            url: http(s)://HOST:PORT[/PREFIX].
            token: An operator's, node's or job's token; empty for `join` and `health` only.
            endpoint: How the hub is reached.
            timeout_s: Longest wait for the hub to accept, to take or to send anything.

        Raises:
            ConfigError: the URL has another form.
        """
        self._timeout_s = timeout_s
        self._rest = HttpSession(url, token, endpoint=endpoint, timeout_s=timeout_s)
        self.url = self._rest.url

    def close(self) -> None:
        """Close the connections."""
        self._rest.close()

    def __enter__(self) -> HubClient:
        """Return itself; leaving the block closes the connections."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------ nodes

    def nodes(self) -> list[dict[str, Any]]:
        """Return every machine that the hub knows."""
        return list(self._rest.json("GET", "/api/nodes"))

    def hub(self) -> dict[str, Any]:
        """Return the hub's version, age, memory and ticket."""
        return dict(self._rest.json("GET", "/api/hub"))

    def hub_events(self, *, after: int = 0) -> dict[str, Any]:
        """Return {"last", "events"}: what happened to the hub and its machines."""
        return dict(self._rest.json("GET", "/api/events", params={"after": after}))

    def alarms(self, *, all_: bool = False) -> list[dict[str, Any]]:
        """Return what is wrong now, newest first; `all_`: also what was."""
        return list(self._rest.json("GET", "/api/alarms", params={"all": "1" if all_ else "0"}))

    def silence(self, alarm: int, *, silenced: bool = True) -> None:
        """Have nobody told of an open alarm any more, or again."""
        self._rest.call("POST", f"/api/alarms/{alarm}/silence", json={"silenced": silenced})

    def worth(self, job: str) -> dict[str, Any]:
        """Return what each machine of a job brings, and what one more would."""
        return dict(self._rest.json("GET", _path(job, "worth")))

    def health(self) -> None:
        """Return if a hub answers and is well."""
        self._rest.call("GET", "/healthz")

    # ------------------------------------------------------------------------------- jobs

    def submit(
        self,
        spec: str,
        *,
        files: Mapping[str, str] | None = None,
        batch: str = "",
        key: str = "",
    ) -> str:
        """Submit a job and return its id; sent again when no answer comes, it is one job still.

        Args:
            spec: The job's TOML text.
            files: Name and text of the files that travel with it (the user's script).
            batch: Label of the jobs that are submitted together.
            key: What this submission is called; empty: a name that nobody else has.

        Raises:
            ConfigError: the job file is wrong, or the key is that of another job.
        """
        body = {"spec": spec, "files": dict(files or {}), "batch": batch}
        body["key"] = key or new_token()
        for pause_s in SUBMIT_PAUSES_S:
            with contextlib.suppress(HubUnreachable):
                return str(self._rest.json("POST", "/api/jobs", json=body)["job"])
            time.sleep(pause_s)
        return str(self._rest.json("POST", "/api/jobs", json=body)["job"])

    def scale(self, job: str, *, least: int, most: int) -> None:
        """Let a job that waits or runs have other bounds of members from now on.

        Raises:
            ConfigError: it has ended, or there cannot be so many.
        """
        self._rest.call("POST", _path(job, "nodes"), json={"min": least, "max": most})

    def jobs(self) -> list[dict[str, Any]]:
        """Return every job, newest first."""
        return list(self._rest.json("GET", "/api/jobs"))

    def job(self, job: str) -> dict[str, Any]:
        """Return one job with its members and its progress."""
        return dict(self._rest.json("GET", _path(job)))

    def metrics(self, job: str, *, after: int = 0) -> dict[str, Any]:
        """Return {"last", "points"}: the measurements after number `after`."""
        return dict(self._rest.json("GET", _path(job, "metrics"), params={"after": after}))

    def events(self, job: str, *, after: int = 0, wait_s: float = 0.0) -> dict[str, Any]:
        """Return {"last", "events"}: what happened after number `after`.

        Where nothing has yet, something is waited for, up to `wait_s`.
        """
        params = {"after": after, **({"wait_s": wait_s} if wait_s else {})}
        timeout_s = self._timeout_s + wait_s
        return dict(self._rest.json("GET", _path(job, "events"), params=params, timeout=timeout_s))

    def rounds(self, job: str, *, after: int = 0) -> dict[str, Any]:
        """Return {"last", "rounds"}: decided attempts of rounds after epoch `after`."""
        return dict(self._rest.json("GET", _path(job, "rounds"), params={"after": after}))

    def logs(
        self, job: str, *, after: int = 0, member: str = "", wait_s: float = 0.0, tail: int = 0
    ) -> dict[str, Any]:
        """Return {"last", "lines"}: printed lines after number `after`.

        Args:
            job: The job.
            after: Number of the last line that is known already.
            member: Only lines of this process; empty: of all.
            wait_s: Longest wait for the first new line.
            tail: Only so many last lines, without a wait; 0: from `after` on.
        """
        params: dict[str, str | float] = {"after": after}
        if tail:
            params["tail"] = tail
        if member:
            params["member"] = member
        if wait_s:
            params["wait_s"] = wait_s
        timeout_s = self._timeout_s + wait_s
        return dict(self._rest.json("GET", _path(job, "logs"), params=params, timeout=timeout_s))

    def stop(self, job: str, *, grace_s: float) -> None:
        """Ask a job to save and end; its processes are killed after `grace_s`."""
        self._rest.call("POST", _path(job, "stop"), json={"grace_s": grace_s})

    def resume(self, job: str, *, spec: str = "") -> str:
        """Go on with a job from its last checkpoint; return the id under which it runs.

        Args:
            job: The job.
            spec: Its job file from now on, with other nodes or another strategy; empty: the same.

        Raises:
            ConfigError: the job file is wrong, or changes what cannot change.
        """
        return str(self._rest.json("POST", _path(job, "resume"), json={"spec": spec})["job"])

    def drain(self, node: str, *, draining: bool = True, reason: str = "") -> None:
        """Have a machine give its work back and take none, or take work again."""
        path = f"/api/nodes/{quote(node, safe='')}/drain"
        self._rest.call("POST", path, json={"draining": draining, "reason": reason})

    # ------------------------------------------------------------------------------ files

    def put_file(
        self, job: str, path: str, source: Path | bytes, *, progress: Progress | None = None
    ) -> str:
        """Upload a file of a job and return its SHA-256; the hub shows it whole or not at all.

        Raises:
            StorageFull: the hub's disk is full.
        """
        sha256, nbytes = measure(source)
        self._put(_path(job, "files", path), source, sha256, nbytes, progress)
        return sha256

    def _put(
        self, address: str, source: Path | bytes, sha256: str, nbytes: int, say: Progress | None
    ) -> None:
        """Upload what was measured."""
        self._rest.call(
            "PUT",
            address,
            content=with_progress(blocks(source), nbytes, say),
            headers={"X-Sha256": sha256, "Content-Length": str(nbytes)},
            timeout=max(self._timeout_s, SLOW_ANSWER_S),
        )

    def get_file(
        self,
        job: str,
        path: str,
        target: Path,
        *,
        sha256: str = "",
        progress: Progress | None = None,
    ) -> str:
        """Download a file of a job and return its SHA-256; `target` appears whole or not at all.

        Raises:
            CheckpointMissing: the hub has no such file.
            CheckpointCorrupt: it has another hash than `sha256`, or than the hub says.
            StorageFull: the disk here is full.
        """
        with self._rest.stream(
            "GET", _path(job, "files", path), absent=_absent(job, path)
        ) as response:
            nbytes = int(response.headers.get("Content-Length", "0"))
            source = with_progress(response.iter_bytes(BLOCK_BYTES), nbytes, progress)
            return write_verified(target, source, sha256=sha256 or _hash_of(response))

    def read_file(self, job: str, path: str) -> bytes:
        """Return the content of a small file of a job; raises as `get_file` does."""
        response = self._rest.call("GET", _path(job, "files", path), absent=_absent(job, path))
        check_hash(path, hashlib.sha256(response.content).hexdigest(), expected=_hash_of(response))
        return response.content

    def stat_file(self, job: str, path: str) -> RemoteFile | None:
        """Return name, size and hash of a file of a job, or None if there is none."""
        try:
            response = self._rest.call("HEAD", _path(job, "files", path), absent=_absent(job, path))
        except CheckpointMissing:
            return None
        nbytes = int(response.headers.get("Content-Length", "0"))
        return RemoteFile(path, nbytes, _hash_of(response))

    def files(self, job: str) -> list[RemoteFile]:
        """Return every file of a job."""
        return [
            RemoteFile(str(item["name"]), int(item["nbytes"]), str(item.get("sha256", "")))
            for item in self._rest.json("GET", _path(job, "files"))
        ]

    # ------------------------------------------------------------------------------ blobs

    def put_blob(self, source: Path | bytes, *, progress: Progress | None = None) -> str:
        """Send a blob, unless the hub has it; return its SHA-256. Unheld it goes after an hour.

        Raises:
            ConfigError: there is no such file.
            StorageFull: the hub's disk is full.
        """
        sha256, nbytes = measure(source)
        if not self.has_blob(sha256):
            self._put(f"/api/blobs/{sha256}", source, sha256, nbytes, progress)
        return sha256

    def has_blob(self, sha256: str) -> bool:
        """Return whether the hub has a blob; if so, it stays for another hour."""
        absent = _no_blob(sha256)
        try:
            self._rest.call("HEAD", f"/api/blobs/{quote(sha256, safe='')}", absent=absent)
        except HubError as error:
            if error is absent:
                return False
            raise
        return True

    def get_blob(self, sha256: str, target: Path, *, progress: Progress | None = None) -> None:
        """Fetch a blob into a file that appears whole or not at all.

        Raises:
            HubError: the hub does not have it.
            CheckpointCorrupt: it arrived damaged.
            StorageFull: the disk here is full.
        """
        path = f"/api/blobs/{quote(sha256, safe='')}"
        with self._rest.stream("GET", path, absent=_no_blob(sha256)) as response:
            nbytes = int(response.headers.get("Content-Length", "0"))
            source = with_progress(response.iter_bytes(BLOCK_BYTES), nbytes, progress)
            write_verified(target, source, sha256=sha256)

    # ------------------------------------------------------------------------------ speed

    def download_bps(self, nbytes: int) -> float:
        """Return the bits per second at which `nbytes` come from the hub."""
        started = time.monotonic()
        with self._rest.stream("GET", "/api/speed", params={"bytes": nbytes}) as response:
            received = sum(len(block) for block in response.iter_raw(BLOCK_BYTES))
        return received * 8 / max(time.monotonic() - started, 1e-9)

    def upload_bps(self, nbytes: int) -> float:
        """Return the bits per second at which `nbytes` go to the hub."""
        started = time.monotonic()
        self._rest.call(
            "POST",
            "/api/speed",
            content=blocks(bytes(nbytes)),
            headers={"Content-Length": str(nbytes)},
        )
        return nbytes * 8 / max(time.monotonic() - started, 1e-9)


def _path(job: str, *parts: str) -> str:
    """Return the path of something of a job."""
    return "/".join(("/api/jobs", quote(job, safe=""), *(quote(part) for part in parts)))


def _absent(job: str, path: str) -> CheckpointMissing:
    """Return the error for a file that the hub does not have."""
    return CheckpointMissing("the hub has no such file", given=f"{path} of {job}")


def _no_blob(sha256: str) -> HubError:
    """Return the error for a blob that the hub does not have."""
    return HubError("the hub does not have this blob", given=sha256)


def _hash_of(response: httpx.Response) -> str:
    """Return the SHA-256 that the hub says a file has, or an empty text."""
    return str(response.headers.get("X-Sha256", ""))
