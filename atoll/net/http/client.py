"""The hub's REST interface for the command line, workers and checkpoints."""

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
from atoll.net.http.calls import (
    AccessCalls,
    DeletionCalls,
    PairingCalls,
    QueueCalls,
    RendezvousCalls,
    SecretCalls,
)
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
from atoll.net.http.verification_calls import VerificationCalls

SUBMIT_PAUSES_S = (0.5, 1.5)
"""Pauses before an unanswered submission is repeated."""

SLOW_ANSWER_S = 120.0
"""Timeout of requests that end when a file is durable at the hub."""

RESUME_TIMEOUT_S = 1800.0
"""Timeout of a resume: the hub hashes a whole checkpoint first, at about 1 GB/s per core."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a job at the hub; `sha256` is empty if the hub does not know it."""

    name: str
    nbytes: int
    sha256: str


class HubClient(
    AccessCalls,
    PairingCalls,
    DeletionCalls,
    RendezvousCalls,
    QueueCalls,
    SecretCalls,
    VerificationCalls,
):
    """A client of one hub, for one thread at a time; close it, or use `with`.

    Every method raises HubUnreachable without an answer, and otherwise the hub's error.
    """

    def __init__(
        self, url: str, token: str = "", *, endpoint: HubEndpoint = PLAIN, timeout_s: float = 30.0
    ) -> None:
        """Prepare a client; connections open with the first request.

        Args:
            url: http(s)://HOST:PORT[/PREFIX].
            token: An operator's, node's or job's token; empty for `join` and `health` only.
            endpoint: How to reach the hub.
            timeout_s: Timeout of connecting, and of each read and write.

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
        """Return the client; leaving the block closes its connections."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------ nodes

    def nodes(self) -> list[dict[str, Any]]:
        """Return all nodes."""
        return list(self._rest.json("GET", "/api/nodes"))

    def hub(self) -> dict[str, Any]:
        """Return the hub's version, age, memory and ticket."""
        return dict(self._rest.json("GET", "/api/hub"))

    def hub_events(self, *, after: int = 0) -> dict[str, Any]:
        """Return {"last", "events"} of the hub and its nodes."""
        return dict(self._rest.json("GET", "/api/events", params={"after": after}))

    def alarms(self, *, all_: bool = False) -> list[dict[str, Any]]:
        """Return open alarms, newest first; `all_`: also ended ones."""
        return list(self._rest.json("GET", "/api/alarms", params={"all": "1" if all_ else "0"}))

    def limits(self, *, all_: bool = False) -> dict[str, Any]:
        """Return the hub's limits and their largest users; `all_`: every user."""
        return dict(self._rest.json("GET", "/api/limits", params={"all": "1" if all_ else "0"}))

    def silence(self, alarm: int, *, silenced: bool = True) -> None:
        """Silence an open alarm, or end its silence."""
        self._rest.call("POST", f"/api/alarms/{alarm}/silence", json={"silenced": silenced})

    def worth(self, job: str) -> dict[str, Any]:
        """Return the marginal throughput of each node of a job, and of one more."""
        return dict(self._rest.json("GET", _path(job, "worth")))

    def health(self) -> None:
        """Check that the hub answers."""
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
        """Submit a job and return its id; repetitions without an answer create one job only.

        Args:
            spec: The job's TOML text.
            files: Name -> text of further files, e.g. the user's script.
            batch: Label of jobs that are submitted together.
            key: Idempotency key; empty: a random one.

        Raises:
            ConfigError: the job file is wrong, or the key belongs to another job.
        """
        body = {"spec": spec, "files": dict(files or {}), "batch": batch}
        body["key"] = key or new_token()
        for pause_s in SUBMIT_PAUSES_S:
            with contextlib.suppress(HubUnreachable):
                return str(self._rest.json("POST", "/api/jobs", json=body)["job"])
            time.sleep(pause_s)
        return str(self._rest.json("POST", "/api/jobs", json=body)["job"])

    def scale(self, job: str, *, least: int, most: int) -> None:
        """Change the bounds on the members of a waiting or running job.

        Raises:
            ConfigError: it has ended, or the bounds are invalid.
        """
        self._rest.call("POST", _path(job, "nodes"), json={"min": least, "max": most})

    def jobs(self, *, brief: bool = False) -> list[dict[str, Any]]:
        """Return every job, newest first; `brief`: without job files and members."""
        params = {"brief": "1"} if brief else {}
        return list(self._rest.json("GET", "/api/jobs", params=params))

    def job(self, job: str) -> dict[str, Any]:
        """Return one job with members and progress."""
        return dict(self._rest.json("GET", _path(job)))

    def metrics(self, job: str, *, after: int = 0) -> dict[str, Any]:
        """Return {"last", "points"} after id `after`."""
        return dict(self._rest.json("GET", _path(job, "metrics"), params={"after": after}))

    def events(self, job: str, *, after: int = 0, wait_s: float = 0.0) -> dict[str, Any]:
        """Return {"last", "events"} after id `after`; wait up to `wait_s` for the first."""
        params = {"after": after, **({"wait_s": wait_s} if wait_s else {})}
        timeout_s = self._timeout_s + wait_s
        return dict(self._rest.json("GET", _path(job, "events"), params=params, timeout=timeout_s))

    def rounds(self, job: str, *, after: int = 0) -> dict[str, Any]:
        """Return {"last", "rounds"}: decided attempts after epoch `after`."""
        return dict(self._rest.json("GET", _path(job, "rounds"), params={"after": after}))

    def logs(
        self, job: str, *, after: int = 0, member: str = "", wait_s: float = 0.0, tail: int = 0
    ) -> dict[str, Any]:
        """Return {"last", "lines"} after id `after`, of one member or all.

        Waits up to `wait_s` for the first new line. `tail`: only that many last lines, without
        waiting.
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

    def resume(self, job: str, *, spec: str = "", checkpoint: int | None = None) -> str:
        """Resume a job from a checkpoint; return the id of the new run.

        Args:
            job: Which job.
            spec: A new job file, with other nodes or another strategy; empty: the same.
            checkpoint: Its round; -1: none, the job begins again; None: the newest undamaged one.

        Raises:
            ConfigError: the job file is wrong, or changes what cannot change.
            CheckpointMissing: there is no such checkpoint.
            CheckpointCorrupt: that checkpoint, or every one of the job, is damaged.
        """
        body = {"spec": spec, "checkpoint": checkpoint}
        answer = self._rest.json("POST", _path(job, "resume"), json=body, timeout=RESUME_TIMEOUT_S)
        return str(answer["job"])

    def drain(self, node: str, *, draining: bool = True, reason: str = "") -> None:
        """Drain a node, or end its draining."""
        path = f"/api/nodes/{quote(node, safe='')}/drain"
        self._rest.call("POST", path, json={"draining": draining, "reason": reason})

    # ------------------------------------------------------------------------------ files

    def put_file(
        self, job: str, path: str, source: Path | bytes, *, progress: Progress | None = None
    ) -> str:
        """Upload a file of a job atomically and return its SHA-256.

        Raises:
            StorageFull: the hub's disk is full.
        """
        sha256, nbytes = measure(source)
        self._put(_path(job, "files", path), source, sha256, nbytes, progress)
        return sha256

    def _put(
        self, address: str, source: Path | bytes, sha256: str, nbytes: int, say: Progress | None
    ) -> None:
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
        """Download a file of a job to `target` atomically and return its SHA-256.

        Raises:
            CheckpointMissing: the hub has no such file.
            CheckpointCorrupt: its hash is not `sha256`, or not the one that the hub reports.
            StorageFull: the local disk is full.
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
        """Return name, size and hash of a file of a job, or None."""
        try:
            response = self._rest.call("HEAD", _path(job, "files", path), absent=_absent(job, path))
        except CheckpointMissing:
            return None
        nbytes = int(response.headers.get("Content-Length", "0"))
        return RemoteFile(path, nbytes, _hash_of(response))

    def files(self, job: str) -> list[RemoteFile]:
        """Return all files of a job."""
        return [
            RemoteFile(str(item["name"]), int(item["nbytes"]), str(item.get("sha256", "")))
            for item in self._rest.json("GET", _path(job, "files"))
        ]

    # ------------------------------------------------------------------------------ blobs

    def put_blob(self, source: Path | bytes, *, progress: Progress | None = None) -> str:
        """Upload a blob unless the hub has it; return its SHA-256.

        Raises:
            ConfigError: there is no such file.
            StorageFull: the hub's disk is full.
        """
        sha256, nbytes = measure(source)
        if not self.has_blob(sha256):
            self._put(f"/api/blobs/{sha256}", source, sha256, nbytes, progress)
        return sha256

    def has_blob(self, sha256: str) -> bool:
        """Return whether the hub has a blob; if so, it is kept for another hour."""
        absent = _no_blob(sha256)
        try:
            self._rest.call("HEAD", f"/api/blobs/{quote(sha256, safe='')}", absent=absent)
        except HubError as error:
            if error is absent:
                return False
            raise
        return True

    def get_blob(self, sha256: str, target: Path, *, progress: Progress | None = None) -> None:
        """Download a blob to `target` atomically.

        Raises:
            HubError: the hub does not have it.
            CheckpointCorrupt: it arrived damaged.
            StorageFull: the local disk is full.
        """
        path = f"/api/blobs/{quote(sha256, safe='')}"
        with self._rest.stream("GET", path, absent=_no_blob(sha256)) as response:
            nbytes = int(response.headers.get("Content-Length", "0"))
            source = with_progress(response.iter_bytes(BLOCK_BYTES), nbytes, progress)
            write_verified(target, source, sha256=sha256)

    # ------------------------------------------------------------------------------ speed

    def download_bps(self, nbytes: int) -> float:
        """Return the bits per second of a download of `nbytes`."""
        started = time.monotonic()
        with self._rest.stream("GET", "/api/speed", params={"bytes": nbytes}) as response:
            received = sum(len(block) for block in response.iter_raw(BLOCK_BYTES))
        return received * 8 / max(time.monotonic() - started, 1e-9)

    def upload_bps(self, nbytes: int) -> float:
        """Return the bits per second of an upload of `nbytes`."""
        started = time.monotonic()
        self._rest.call(
            "POST",
            "/api/speed",
            content=blocks(bytes(nbytes)),
            headers={"Content-Length": str(nbytes)},
        )
        return nbytes * 8 / max(time.monotonic() - started, 1e-9)


def _path(job: str, *parts: str) -> str:
    return "/".join(("/api/jobs", quote(job, safe=""), *(quote(part) for part in parts)))


def _absent(job: str, path: str) -> CheckpointMissing:
    return CheckpointMissing("the hub has no such file", given=f"{path} of {job}")


def _no_blob(sha256: str) -> HubError:
    return HubError("the hub does not have this blob", given=sha256)


def _hash_of(response: httpx.Response) -> str:
    return str(response.headers.get("X-Sha256", ""))
