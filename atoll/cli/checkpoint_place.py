"""Find the checkpoints named on the command line: a folder, a job of the hub, or a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from atoll.checkpoint.stores.folder import Folder, missing
from atoll.checkpoint.stores.remote import Remote, locate
from atoll.cli import hub_access
from atoll.cli.hub_access import KnownHub
from atoll.cli.jobs.names import job_named, local_run
from atoll.errors import CheckpointMissing, ConfigError, HubError, JobError
from atoll.wire.manifest import MANIFEST_NAME, Manifest, checkpoint_folder, round_of
from atoll.wire.part_check import check_part, open_manifest


class Place(Protocol):
    """Checkpoints of one job."""

    name: str
    """Name used in messages."""

    def manifests(self) -> dict[int, Manifest]:
        """Return the manifests of all checkpoints by round, ascending."""
        ...

    def part(self, round_: int, name: str, scratch: Path) -> Path:
        """Return a verified file of a part; `scratch` is for downloads.

        Raises:
            CheckpointCorrupt: it is missing or damaged.
        """
        ...


class LocalPlace:
    """A job's folder on this machine."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = str(folder), folder
        self._files = Folder(folder)

    def manifests(self) -> dict[int, Manifest]:
        """Return all manifests, including those of checkpoints with damaged parts."""
        found = {}
        for path in (self.folder / "checkpoints").glob(f"round-*/{MANIFEST_NAME}"):
            round_ = round_of(path.parent.name)
            if round_ is not None and self._files.place(round_) == path.parent:
                found[round_] = self._files.manifest(round_)
        return dict(sorted(found.items()))

    def part(self, round_: int, name: str, scratch: Path) -> Path:
        """Return the verified file itself."""
        return self._files.check(round_, names=[name])[name]


class RemotePlace:
    """A job's copies at an fsspec URL."""

    def __init__(self, remote: Remote, *, name: str) -> None:
        self.name, self.remote = name, remote

    def manifests(self) -> dict[int, Manifest]:
        """Return the manifests of all copies."""
        return {round_: self.remote.manifest(round_) for round_ in self.remote.rounds()}

    def part(self, round_: int, name: str, scratch: Path) -> Path:
        """Download a part and check it."""
        return self.remote.fetch_part(round_, name, scratch)


class HubPlace:
    """A job at a hub."""

    def __init__(self, hub: KnownHub, job: str) -> None:
        self.name, self._hub, self._job = f"{job} at {hub.url}", hub, job

    def manifests(self) -> dict[int, Manifest]:
        """Return the manifests of all checkpoints."""
        found = {}
        with self._hub.client() as client:
            for file in client.files(self._job):
                folder, _, name = file.name.rpartition("/")
                round_ = round_of(folder)
                if name == MANIFEST_NAME and round_ is not None:
                    data = client.read_file(self._job, file.name)
                    found[round_] = open_manifest(data, round_=round_)
        return dict(sorted(found.items()))

    def part(self, round_: int, name: str, scratch: Path) -> Path:
        """Download a part and check it."""
        target = scratch / name
        with self._hub.client() as client:
            path = f"{checkpoint_folder(round_)}/{name}"
            manifest = client.read_file(self._job, f"{checkpoint_folder(round_)}/{MANIFEST_NAME}")
            try:
                client.get_file(self._job, path, target)
            except CheckpointMissing:
                target.unlink(missing_ok=True)
        for entry in open_manifest(manifest, round_=round_).parts:
            if entry.name == name:
                check_part(target, entry, round_=round_)
        return target


def find(where: str, *, runs: Path, hub: str) -> Place:
    """Return the checkpoints that `where` names.

    Args:
        where: A job's folder, the name of a job in `runs` or at the hub, or a URL.
        runs: Folder of the runs on this machine.
        hub: Ticket or URL of a hub; empty: the last one, if nothing is found locally.

    Raises:
        CheckpointMissing: nothing has that name; the message lists the searched places.
    """
    if "://" in where:
        return RemotePlace(locate(where), name=where)
    if not hub:
        folder = next((f for f in (Path(where), runs / where) if _has_checkpoints(f)), None)
        folder = folder or local_run(where, runs)
        if folder is not None and _has_checkpoints(folder):
            return LocalPlace(folder)
    looked = f"{where} and {runs / where}"
    try:
        known = hub_access.find(hub)
        with known.client() as client:
            where = job_named(client, where)
    except (HubError, ConfigError, JobError) as error:
        if hub:
            raise
        raise CheckpointMissing(
            "there are no checkpoints of that name",
            given=where,
            expected="a folder runs/JOB, a job of the hub, or a URL such as s3://bucket/runs/JOB",
            remedy=f"looked in {looked}, and asked the hub: {error.what}",
        ) from error
    return HubPlace(known, where)


def _has_checkpoints(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir()


def choose(place: Place, round_: int) -> Manifest:
    """Return the manifest of a round; -1 means the newest.

    Raises:
        CheckpointMissing: there is no such checkpoint.
    """
    found = place.manifests()
    if not found:
        raise CheckpointMissing("there is no complete checkpoint", given=place.name)
    if round_ < 0:
        return found[max(found)]
    if round_ not in found:
        raise missing(round_, place=place.name, rounds=list(found))
    return found[round_]


def chosen_round(text: str) -> int | None:
    """Return the round that `atoll resume --checkpoint` names; -1: the start, None: not given.

    Raises:
        ConfigError: it is neither a round, nor a checkpoint's folder, nor `start`.
    """
    if not text:
        return None
    if text == "start":
        return -1
    round_ = int(text) if text.isdecimal() else round_of(Path(text).name)
    if round_ is None:
        raise ConfigError(
            "this is not a checkpoint", given=text,
            expected="a round such as 12, a folder such as checkpoints/round-000012, or start",
            remedy="`atoll checkpoint list JOB` lists them; one of another folder comes in by "
            "`atoll checkpoint import`",
        )  # fmt: skip
    return round_
