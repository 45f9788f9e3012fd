"""Models and data sets of a model hub: whether the hub can be reached, and a data set's files.

The hub is that of `huggingface_hub`, or another that HF_ENDPOINT names.
"""

from __future__ import annotations

import glob
import os
import re
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Self
from urllib.parse import urlsplit
from urllib.request import getproxies

from atoll.errors import ConfigError, DataError

CONNECT_S = 5.0
"""Longest wait for the hub; the library itself tries for most of a minute."""
PREFIX = "hub:"
"""Begins the name of a data set: `hub:OWNER/NAME[@REVISION][/GLOB]`."""
TABLES = (".jsonl", ".json", ".parquet", ".csv")
"""Formats that always hold examples; a text file may be the data set's description."""
HELD_OUT = re.compile(r"(?<![a-z])(test|valid|validation|val|dev|eval)(?![a-z])")
"""Parts of a file's name that say it is not for training."""

_NAMED = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?")


def check_reachable(what: str, name: str, *, command: str) -> None:
    """Raise DataError if the hub of `name` cannot be reached from this machine.

    Args:
        what: The kind of thing, for the error, e.g. `model`.
        name: Its name at the hub, e.g. `HuggingFaceTB/SmolLM2-135M`.
        command: Downloads it on a machine with a network.

    Raises:
        DataError: says how to bring the files here.
    """
    from huggingface_hub import constants

    place = urlsplit(constants.ENDPOINT)
    port = place.port or (443 if place.scheme == "https" else 80)
    why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else ""
    if (
        not why and place.scheme not in getproxies()
    ):  # a proxy resolves more names than this machine
        try:
            socket.create_connection((place.hostname or "", port), timeout=CONNECT_S).close()
        except OSError as error:
            why = f"{place.hostname}:{port} cannot be reached ({error})"
    if why:
        raise DataError(
            f"this {what} is not on this machine, and its hub cannot be asked",
            given=f"{name}: {why}",
            expected="a network, or a folder with the files, on every machine that trains",
            remedy=f"where there is a network: {command}; then give "
            "that folder in place of the name (HF_ENDPOINT names another hub)",
        )


class HubFiles(NamedTuple):
    """What an entry of `data` asks for."""

    name: str
    """OWNER/NAME of the data set."""
    revision: str
    """A branch, tag or commit; empty: the main branch."""
    pattern: str
    """Which files, with `*` and `?`; empty: those for training."""

    @classmethod
    def parse(cls, entry: str) -> Self:
        """Read an entry; raises ConfigError."""
        found = _NAMED.fullmatch(entry)
        if found is None:
            raise ConfigError(
                "a data set of a model hub is named otherwise", given=entry,
                expected="hub:OWNER/NAME, perhaps with @REVISION and /FILES, "
                "e.g. hub:ada/chats@main/data/train-*.parquet",
            )  # fmt: skip
        return cls(found[1], found[2] or "", found[3] or "")

    def choose(self, files: Sequence[str]) -> list[str]:
        """Return which of the data set's files to read, sorted.

        Without a pattern: tables, except those named as held out; if some are named `train`, only
        these.

        Raises:
            DataError: there are none; the error lists some of the data set's files.
        """
        if self.pattern:
            chosen = [file for file in files if fnmatchcase(file, self.pattern)]
        else:
            data = [file for file in files if PurePosixPath(file).suffix.lower() in TABLES]
            chosen = [file for file in data if not HELD_OUT.search(file.lower())]
            chosen = [file for file in chosen if "train" in file.lower()] or chosen
        if not chosen:
            some = ", ".join(sorted(files)[:6])
            raise DataError(
                f"the data set {self.name} has no such files",
                given=self.pattern or f"no file of {', '.join(TABLES)} for training",
                expected=f"some of its {len(files)} files: {some}",
                remedy=f"hub:{self.name}/FILES, with * and ?",
            )
        return sorted(chosen)


def fetch_files(entry: str) -> list[Path]:
    """Return the files that an entry names, from the library's cache or the hub.

    Raises:
        ConfigError: the entry is malformed, or the library is missing.
        DataError: the hub cannot be reached, or does not have it.
    """
    wanted = HubFiles.parse(entry)
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError(
            "data sets of a model hub need a library that is not installed", given=str(error),
            expected="huggingface_hub", remedy="pip install 'atoll[tune]'",
        ) from error  # fmt: skip
    api, name, revision = HfApi(), wanted.name, wanted.revision or None
    command = f"hf download --repo-type dataset {name} --local-dir FOLDER"
    try:
        check_reachable("data set", name, command=command)
    except DataError:
        try:  # what was fetched before
            place = Path(
                api.snapshot_download(
                    name, repo_type="dataset", revision=revision, local_files_only=True
                )
            )
        except Exception:  # any error of the library: it is not here
            place = None
        if place is None:
            raise
        here = [one.relative_to(place).as_posix() for one in place.rglob("*") if one.is_file()]
        return [place / file for file in wanted.choose(here)]
    try:
        files = api.list_repo_files(name, repo_type="dataset", revision=revision)
        return [
            Path(api.hf_hub_download(name, file, repo_type="dataset", revision=revision))
            for file in wanted.choose(files)
        ]
    except DataError:
        raise
    except Exception as error:  # the library has no common class for its errors
        raise DataError(
            f"the hub did not give the data set {name}",
            given=(str(error).strip() or type(error).__name__).splitlines()[0],
            expected="a data set that exists and that you may read",
            remedy="check the name; for a private or gated one: hf auth login, or HF_TOKEN",
        ) from error


def find_here(pattern: str) -> list[Path]:
    """Return the files of a name, a glob (`~` is expanded) or a data set of a hub, sorted by name.

    Raises:
        ConfigError, DataError: see :func:`fetch_files`.
    """
    if pattern.startswith(PREFIX):
        return fetch_files(pattern)
    names = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    return [Path(name) for name in names if Path(name).is_file()]
