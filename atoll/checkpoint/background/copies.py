"""Copy complete checkpoints to an object store or folder, through fsspec.

  <url>/<job>/job.toml
  <url>/<job>/checkpoints/round-000012/...     parts first, the manifest last

A copy exists once its manifest does. A journal in the job's folder lists the copied parts, so that
only missing ones are sent after a restart. Copies are never deleted to save space: the store has
its own rules for that. Only manifests of rounds later than those of the run are withdrawn, because
the run resumed from an earlier round.

Also a program, `python -m atoll.checkpoint.background.copies`, which the hub runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from atoll.checkpoint.background.child import Reporter, lower_priority
from atoll.checkpoint.background.messages import Copied, CopyFailed, Report, WriterIdle
from atoll.checkpoint.files import Moment, unobserved, write_file
from atoll.checkpoint.stores.folder import Folder
from atoll.checkpoint.stores.remote import Remote
from atoll.errors import AtollError, CheckpointError, CheckpointMissing
from atoll.net.retry import backoff
from atoll.wire.manifest import MANIFEST_NAME, Manifest, ManifestPart

logger = logging.getLogger(__name__)

JOURNAL = "copies.json"
"""In the job's folder: what has been copied where."""

JOB_FILE = "job.toml"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class CopyTask(msgspec.Struct, frozen=True):
    """The first line of input of a process that copies."""

    folder: str
    url: str
    job: str
    options: dict[str, str] = {}
    """Options of the URL's driver."""
    secrets: dict[str, str] = {}
    """Values among them that must stay secret, by name."""


Hide = Callable[[str], str]


class Entry(msgspec.Struct):
    """The copied parts of one checkpoint."""

    manifest: str
    """SHA-256 of the manifest that the parts belong to."""
    parts: dict[str, str] = {}
    """Name -> SHA-256 of every copied part."""
    done: bool = False
    """Whether the manifest is copied too."""


class Journal(msgspec.Struct):
    """The copies at one URL."""

    url: str
    rounds: dict[int, Entry] = {}


class CheckpointCopies:
    """Copies one job's checkpoints to one place.

    Args:
        folder: The job's folder.
        url: fsspec URL below which a folder with the job's name is made.
        job: Its name; the folder's by default.
        moment: Called at every point of a copy; for tests.
        options: Options of the URL's driver.
    """

    def __init__(
        self, folder: Path, url: str, *, job: str = "", moment: Moment = unobserved,
        options: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._options = options
        self._folder = Folder(folder, job=job)
        self._url = url
        self._moment = moment
        self._remote: Remote | None = None

    def pending(self) -> list[int]:
        """Return the rounds of complete checkpoints that are not copied yet, ascending."""
        journal = self._read()
        waiting = []
        for round_ in self._folder.complete():
            entry = journal.rounds.get(round_)
            if entry is None or not entry.done or entry.manifest != _sha(self._manifest(round_)):
                waiting.append(round_)
        return waiting

    def copy(self, round_: int) -> int:
        """Copy one checkpoint; return how many bytes were sent.

        Raises:
            ConfigError: the URL is of a kind that is not installed here.
            CheckpointMissing: the checkpoint was deleted meanwhile.
            CheckpointError: the store refused, or did not answer.
        """
        remote = self._open()
        try:
            manifest = self._folder.manifest(round_)
            data = self._manifest(round_)
        except FileNotFoundError as error:
            raise CheckpointMissing("it was deleted before it was copied", given=round_) from error
        journal = self._read()
        entry = journal.rounds.get(round_)
        if entry is None or entry.manifest != _sha(data):
            entry = journal.rounds[round_] = Entry(_sha(data))
            remote.withdraw(round_)
        sent = self._send_parts(remote, journal, entry, manifest)
        toml = self._folder.path / JOB_FILE
        if toml.exists():
            remote.write(JOB_FILE, toml.read_bytes())
        remote.write_manifest(round_, data)
        self._moment("manifest copied")
        entry.done = True
        self._withdraw_later(remote, journal)
        self._note(journal)
        return sent + len(data)

    def _send_parts(
        self, remote: Remote, journal: Journal, entry: Entry, manifest: Manifest
    ) -> int:
        sent = 0
        for part in manifest.parts:
            if entry.parts.get(part.name) == part.sha256 and self._is_there(remote, manifest, part):
                continue
            source = self._folder.place(manifest.round) / part.name
            if not source.exists():
                raise CheckpointMissing("it was deleted while it was copied", given=str(source))
            remote.send(manifest.round, part, source)
            self._moment(f"{part.name} copied")
            entry.parts[part.name] = part.sha256
            self._note(journal)
            sent += part.nbytes
        return sent

    def _is_there(self, remote: Remote, manifest: Manifest, part: ManifestPart) -> bool:
        return remote.size(manifest.round, part.name) == part.nbytes

    def _withdraw_later(self, remote: Remote, journal: Journal) -> None:
        """Withdraw copies later than the newest checkpoint here."""
        newest = max(self._folder.complete(), default=-1)
        for later in [round_ for round_ in remote.rounds() if round_ > newest >= 0]:
            remote.withdraw(later)
            journal.rounds.pop(later, None)

    def _open(self) -> Remote:
        if self._remote is None:
            self._remote = Remote(self._url, job=self._folder.job, options=self._options)
        return self._remote

    def _manifest(self, round_: int) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder.place(round_) / MANIFEST_NAME).read_bytes()
        return b""

    def _read(self) -> Journal:
        try:
            data = (self._folder.path / JOURNAL).read_bytes()
            journal = msgspec.json.decode(data, type=Journal)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return Journal(self._url)
        return journal if journal.url == self._url else Journal(self._url)

    def _note(self, journal: Journal) -> None:
        kept = self._folder.complete()
        journal.rounds = {r: entry for r, entry in journal.rounds.items() if r in kept}
        write_file(self._folder.path / JOURNAL, [msgspec.json.encode(journal)])


class Copier:
    """A thread that copies pending checkpoints and retries until it succeeds."""

    def __init__(self, copies: CheckpointCopies, *, report: Callable[[Report], None]) -> None:
        """Start the thread; it waits for `wake`."""
        self._copies, self._report = copies, report
        self._waking = threading.Event()
        threading.Thread(target=self._run, name="copies", daemon=True).start()

    def wake(self) -> None:
        """Notify that a checkpoint may be pending."""
        self._waking.set()

    def _run(self) -> None:
        while True:
            self._waking.wait()
            self._waking.clear()
            copy_all(self._copies, report=self._report)
            if not self._waking.is_set():
                self._report(WriterIdle())


def copy_all(
    copies: CheckpointCopies, *, report: Callable[[Report], None], hide: Hide = lambda text: text,
    patient: bool = True,
) -> bool:  # fmt: skip
    """Copy all pending checkpoints; return whether all are.

    Retries without end if `patient`, else returns at the first failure. `hide` removes secrets from
    what is said about failures.
    """
    pauses = backoff(first_s=FIRST_PAUSE_S, cap_s=LONGEST_PAUSE_S)
    while waiting := copies.pending():
        round_, began = waiting[-1], time.monotonic()  # the newest is what is needed first
        try:
            nbytes = copies.copy(round_)
        except CheckpointMissing:
            continue  # pruned meanwhile: `pending` does not name it again
        except (AtollError, OSError) as raised:
            error = _explained(raised)
            pause_s = next(pauses)
            logger.warning("checkpoint of round %s was not copied: %s", round_, hide(str(error)))
            said = {key: hide(text) for key, text in error.to_dict().items()}
            report(CopyFailed(round_, said, pause_s))
            if not patient:
                return False
            time.sleep(pause_s)
        else:
            pauses = backoff(first_s=FIRST_PAUSE_S, cap_s=LONGEST_PAUSE_S)
            report(Copied(round_, nbytes, time.monotonic() - began))
    return True


def _explained(error: AtollError | OSError) -> AtollError:
    """Return the error that is reported for a failed copy."""
    if isinstance(error, AtollError):
        return error
    return CheckpointError("files of the job cannot be read or written", given=str(error))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hiding(secrets: Mapping[str, str]) -> Hide:
    """Return what replaces these values in a text by their names."""

    def hide(text: str) -> str:
        for name, value in secrets.items():
            if value:
                text = text.replace(value, f"(secret {name})")
        return text

    return hide


def run(commands: BinaryIO, reports: BinaryIO) -> None:
    """Copy one folder's pending checkpoints; ends early when the commands do."""
    task = msgspec.json.decode(commands.readline(), type=CopyTask)
    report = Reporter(reports)

    def listen() -> None:
        commands.read()
        os._exit(1)  # the parent process has ended

    threading.Thread(target=listen, name="commands", daemon=True).start()

    copies = CheckpointCopies(Path(task.folder), task.url, job=task.job, options=task.options)
    # With secrets it does not retry: the next process gets them anew, perhaps corrected.
    if not copy_all(copies, report=report, hide=hiding(task.secrets), patient=not task.secrets):
        os._exit(1)
    report(WriterIdle())


if __name__ == "__main__":
    # The setup comes by stdin, because every user of the machine can read command lines.
    run(*lower_priority())
    os._exit(0)  # do not wait for threads of a driver
