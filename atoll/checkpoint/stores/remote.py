"""A job's checkpoints at an fsspec URL: an object store, a share, another machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from atoll.checkpoint.files import write_file
from atoll.checkpoint.stores.folder import missing
from atoll.errors import AtollError, CheckpointError, CheckpointMissing, ConfigError
from atoll.system import flush_folder
from atoll.wire.manifest import MANIFEST_NAME, Manifest, ManifestPart, checkpoint_folder, round_of
from atoll.wire.part_check import check_part, open_manifest

REMEDY = "check the URL, the permissions and the connection"


class Remote:
    """Files below `<url>/<job>`, or below the URL itself when `job` is empty.

    Every method raises CheckpointError with the driver's message when the store fails.

    Raises:
        ConfigError: the URL's scheme is unknown, or its driver is not installed.
    """

    def __init__(
        self, url: str, *, job: str = "", options: Mapping[str, str] | None = None
    ) -> None:
        """Open the place; `options` are those of its fsspec driver."""
        self.url = url
        self._files, root = _open(url, options or {})
        self._root = f"{root.rstrip('/')}/{job}" if job else root.rstrip("/")

    # ------------------------------------------------------------------------ writing

    def send(self, round_: int, part: ManifestPart, source: Path) -> None:
        """Upload a file, and check its size afterwards."""
        path = self._path(f"{checkpoint_folder(round_)}/{part.name}")
        with self._translated(path):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(source), path)
        size = self.size(round_, part.name)
        if size != part.nbytes:
            raise CheckpointError(
                "a part did not arrive whole in the object store",
                given=f"{part.name}: {size} bytes", expected=f"{part.nbytes} bytes",
            )  # fmt: skip

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        path = self._path(name)
        with self._translated(path):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data)

    def write_manifest(self, round_: int, data: bytes) -> None:
        """Write a round's manifest, after which the copy exists."""
        self.write(f"{checkpoint_folder(round_)}/{MANIFEST_NAME}", data)

    def withdraw(self, round_: int) -> None:
        """Delete a round's manifest, after which the copy does not exist."""
        path = self._path(f"{checkpoint_folder(round_)}/{MANIFEST_NAME}")
        with self._translated(path), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)

    # ------------------------------------------------------------------------ reading

    def size(self, round_: int, name: str) -> int:
        """Return a part's size there; -1 if it is missing."""
        path = self._path(f"{checkpoint_folder(round_)}/{name}")
        with self._translated(path):
            self._files.invalidate_cache()
            try:
                return int(self._files.info(path)["size"])
            except FileNotFoundError:
                return -1

    def rounds(self) -> list[int]:
        """Return the rounds whose manifest is there, ascending."""
        path = self._path("checkpoints")
        with self._translated(path):
            self._files.invalidate_cache()
            found = self._files.glob(f"{path}/round-*/{MANIFEST_NAME}")
        rounds = {round_of(str(name).rpartition("/")[0]) for name in found}
        return sorted(round_ for round_ in rounds if round_ is not None)

    def manifest(self, round_: int) -> Manifest:
        """Return a checkpoint's manifest.

        Raises:
            CheckpointMissing: there is none.
            CheckpointCorrupt: it is damaged.
        """
        return open_manifest(self._read_manifest(round_), round_=round_)

    def fetch(self, round_: int, into: Path) -> Manifest:
        """Download a checkpoint into a job's folder, verified, the manifest last.

        Existing parts are not fetched again.

        Raises:
            CheckpointMissing: there is no such checkpoint.
            CheckpointCorrupt: a part is missing there, or damaged.
            StorageFull: the local disk is full.
        """
        data = self._read_manifest(round_)
        manifest = open_manifest(data, round_=round_)
        folder = into / checkpoint_folder(round_)
        folder.mkdir(parents=True, exist_ok=True)
        for part in manifest.parts:
            with contextlib.suppress(AtollError):
                check_part(folder / part.name, part, round_=round_)
                continue
            self._fetch(f"{checkpoint_folder(round_)}/{part.name}", folder / part.name)
            check_part(folder / part.name, part, round_=round_)
        write_file(folder / MANIFEST_NAME, [data])
        return manifest

    def fetch_part(self, round_: int, name: str, into: Path) -> Path:
        """Download one part of a checkpoint into a folder, verified.

        Raises:
            CheckpointMissing: there is no such checkpoint, or it has no such part.
            CheckpointCorrupt: the part is missing there, or damaged.
        """
        parts = {part.name: part for part in self.manifest(round_).parts}
        if name not in parts:
            raise CheckpointMissing(
                f"the checkpoint of round {round_} has no part {name}",
                given=", ".join(parts) or "no parts",
            )
        target = into / name
        self._fetch(f"{checkpoint_folder(round_)}/{name}", target)
        check_part(target, parts[name], round_=round_)
        return target

    def read(self, name: str) -> bytes | None:
        """Return a small file, or None when there is none."""
        path = self._path(name)
        with self._translated(path):
            try:
                return cast(bytes, self._files.cat_file(path))
            except FileNotFoundError:
                return None

    def _read_manifest(self, round_: int) -> bytes:
        data = self.read(f"{checkpoint_folder(round_)}/{MANIFEST_NAME}")
        if data is None:
            raise missing(round_, place=self.url, rounds=self.rounds())
        return data

    def _fetch(self, name: str, target: Path) -> None:
        """Download one file atomically."""
        path = self._path(name)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
        os.close(handle)
        try:
            with self._translated(path):
                try:
                    self._files.get_file(path, temporary)
                except FileNotFoundError:
                    return  # `check_part` says that it is missing
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
            flush_folder(target.parent)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        """Turn any driver's exceptions into CheckpointError: drivers have no common base class."""
        try:
            yield
        except AtollError:
            raise
        except Exception as error:
            raise CheckpointError(
                "the object store reported an error",
                given=f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                remedy=REMEDY,
            ) from error


def locate(url: str) -> Remote:
    """Return the folder of a job at a URL; the URL may name it, or the folder above it.

    Raises:
        ConfigError: the URL's scheme is unknown, or several jobs lie below it.
        CheckpointMissing: no job lies there.
    """
    remote = Remote(url)
    if remote.rounds():
        return remote
    files, root = _open(url, {})
    with remote._translated(root):
        found = files.glob(f"{root.rstrip('/')}/*/checkpoints/round-*/{MANIFEST_NAME}")
    jobs = sorted({str(path).split("/checkpoints/")[0].rpartition("/")[2] for path in found})
    if not jobs:
        raise CheckpointMissing(
            "there is no checkpoint", given=url, expected="URL/checkpoints/round-N/manifest.json",
            remedy=REMEDY,
        )  # fmt: skip
    if len(jobs) > 1:
        raise ConfigError(
            "there are several jobs", given=url, expected="the URL of one of " + ", ".join(jobs)
        )
    return Remote(url, job=jobs[0])


def hidden(url: str) -> str:
    """Return a URL with its password removed."""
    scheme, separator, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}" if separator else url


def _open(url: str, options: Mapping[str, str]) -> tuple[Any, str]:
    """Return the driver for a URL and the path inside it."""
    try:
        import fsspec.core
    except ImportError as error:
        raise ConfigError(
            "copies of checkpoints need a package that is not installed",
            given=str(error), remedy="pip install 'atoll[store]'",
        ) from error  # fmt: skip
    try:
        files, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(
            "this URL cannot be used for checkpoints",
            given=f"{hidden(url)}: {error}",
            expected="a folder, or a URL such as s3://bucket/runs",
            remedy="install the driver that it names: pip install s3fs, gcsfs, adlfs, ...",
        ) from error
    return files, str(path)
