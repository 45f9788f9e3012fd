"""Where checkpoints may be copied: object stores, and folders that the hub's owner opened."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from urllib.parse import unquote

from atoll.errors import ConfigError

NETWORK = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "adl", "abfs", "abfss", "oss", "oci", "hdfs", "webhdfs"}
    | {"hf", "sftp", "ssh", "ftp", "smb", "http", "https", "dropbox", "memory"}
)
"""Schemes of fsspec without access to files of this machine; all others count as its paths."""


@dataclass(frozen=True)
class CopyPlaces:
    """Places that `[checkpoint] to` may name."""

    folders: tuple[Path, ...] = ()
    """Folders of this machine, absolute."""

    def check(self, url: str) -> None:
        """Raise ConfigError if a job may not have its checkpoints copied there."""
        scheme, separator, rest = url.partition("://")
        if not url or (separator and scheme in NETWORK and "::" not in url):
            return
        path = rest if separator else url
        bare = path.removeprefix("file:").removeprefix("local:")  # schemes without slashes
        # Resolves links, `~` and `..`, with and without decoding `%2e`: drivers differ.
        texts = {path, unquote(path), bare, unquote(bare)}
        real = {Path(one).resolve() for text in texts for one in (text, expanduser(text))}
        opened = [folder.resolve() for folder in self.folders]
        inside = all(any(one.is_relative_to(folder) for folder in opened) for one in real)
        if inside and "::" not in url and (not separator or scheme in ("file", "local")):
            return
        names = ", ".join(map(str, self.folders)) or "none"
        raise ConfigError(
            "checkpoints may not be copied there",
            given=f"[checkpoint] to = {url!r}",
            expected=f"a URL such as s3://bucket/runs, or a path in a folder that the hub's owner "
            f"has opened (now: {names})",
            remedy="on the hub's machine: atoll hub --copies FOLDER",
        )


NO_FOLDERS = CopyPlaces()
