"""Copies elsewhere: complete or not there, resumed part by part, brought back verified."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest

from atoll.checkpoint import BackgroundSaver, DirectoryStore, SavePoint
from atoll.checkpoint.background.copies import (
    JOURNAL,
    CheckpointCopies,
    Journal,
    copy_all,
    hiding,
)
from atoll.checkpoint.background.messages import Copied, CopyFailed, FolderTarget, Report
from atoll.checkpoint.stores.remote import Remote, hidden, locate
from atoll.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, ConfigError
from atoll.ids import new_suffix
from atoll.wire.manifest import MANIFEST_NAME, checkpoint_folder
from tests.checkpoint.savers import WAIT_S, Events, newest, parts, save, until_written

PARTS = ("shared.safetensors", "w0.safetensors")


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield a place for copies: a folder, memory, or a bucket at a server that speaks S3."""
    if request.param == "file":
        yield str(tmp_path / "elsewhere")
    elif request.param == "memory":
        yield "memory://elsewhere"
        files = fsspec.filesystem("memory")
        files.rm("/elsewhere", recursive=True)
    else:
        yield request.getfixturevalue("bucket")


everywhere = pytest.mark.parametrize("url", ["file", "memory", "s3"], indirect=True)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    reason = "needs pip install 'atoll[store-test]'"
    pytest.importorskip("s3fs", reason=reason)
    server = pytest.importorskip("moto.server", reason=reason)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    fsspec.filesystem("s3").clear_instance_cache()
    name = f"bucket-{new_suffix()}".lower()  # the server's memory outlives it
    fsspec.filesystem("s3").mkdir(name)
    yield f"s3://{name}/runs"
    fsspec.filesystem("s3").clear_instance_cache()
    running.stop()


def fill(folder: Path, round_: int, *, value: float | None = None) -> None:
    store = DirectoryStore(folder / "job", keep=9)
    own = parts(float(round_) if value is None else value)
    store.put(SavePoint(round_, 10 * round_, "w0", ["w0"]), own)


def copies(folder: Path, url: str) -> CheckpointCopies:
    return CheckpointCopies(folder / "job", url)


class Reports:
    def __init__(self) -> None:
        self.all: list[Report] = []

    def __call__(self, report: Report) -> None:
        self.all.append(report)


@everywhere
def test_copy_is_complete_and_comes_back_bit_for_bit(tmp_path: Path, url: str) -> None:
    for round_ in (1, 2):
        fill(tmp_path, round_)
    (tmp_path / "job" / "job.toml").write_text("[job]\nname = 'x'\n")
    reports = Reports()
    copy_all(copies(tmp_path, url), report=reports)
    assert [r.round for r in reports.all if isinstance(r, Copied)] == [2, 1]
    assert copies(tmp_path, url).pending() == []
    remote = Remote(url, job="job")
    assert remote.rounds() == [1, 2]
    assert remote.read("job.toml") == b"[job]\nname = 'x'\n"
    for round_ in (1, 2):
        remote.fetch(round_, tmp_path / "back" / "job")
    assert newest(tmp_path / "back") == 2
    for round_ in (1, 2):
        for name in (*PARTS, MANIFEST_NAME):
            there = tmp_path / "back/job" / checkpoint_folder(round_) / name
            here = tmp_path / "job" / checkpoint_folder(round_) / name
            assert there.read_bytes() == here.read_bytes()


def test_copy_without_its_manifest_does_not_exist(tmp_path: Path, url: str) -> None:
    fill(tmp_path, 1)
    copies(tmp_path, url).copy(1)
    remote = Remote(url, job="job")
    remote.withdraw(1)
    remote.withdraw(1)
    assert remote.rounds() == []
    with pytest.raises(CheckpointMissing, match="no complete checkpoint of round 1"):
        remote.fetch(1, tmp_path / "back")
    with pytest.raises(CheckpointMissing, match="there is no checkpoint"):
        locate(url)


def test_only_parts_in_the_manifest_are_fetched(tmp_path: Path, url: str) -> None:
    fill(tmp_path, 1)
    copies(tmp_path, url).copy(1)
    remote = Remote(url, job="job")
    remote.write(f"{checkpoint_folder(1)}/other.safetensors", b"not verified")
    assert remote.fetch_part(1, PARTS[0], tmp_path).is_file()
    with pytest.raises(CheckpointMissing, match=r"no part other\.safetensors"):
        remote.fetch_part(1, "other.safetensors", tmp_path)


def test_journal_that_cannot_be_written_is_reported(tmp_path: Path, url: str) -> None:
    fill(tmp_path, 1)
    (tmp_path / "job" / JOURNAL).mkdir()
    reports = Reports()
    assert not copy_all(copies(tmp_path, url), report=reports, patient=False)
    (failed,) = reports.all
    assert isinstance(failed, CopyFailed)
    assert JOURNAL in failed.error["given"]


def test_interrupted_copy_sends_only_what_is_missing(tmp_path: Path, url: str) -> None:
    fill(tmp_path, 1)

    class Stop(Exception):
        pass

    def moment(name: str) -> None:
        if name == f"{PARTS[0]} copied":
            stops.append(name)
        if len(stops) > 1 or name == f"{PARTS[1]} copied":
            raise Stop

    stops: list[str] = []
    interrupted = CheckpointCopies(tmp_path / "job", url, moment=moment)
    with pytest.raises(Stop):
        interrupted.copy(1)
    sizes = {p.name: p.nbytes for p in DirectoryStore(tmp_path / "job").manifest(1).parts}
    data = (tmp_path / "job" / checkpoint_folder(1) / MANIFEST_NAME).read_bytes()
    assert Remote(url, job="job").rounds() == []
    sent = copies(tmp_path, url).copy(1)
    assert sent == sizes[PARTS[1]] + len(data)  # that part was sent, but not noted yet
    assert copies(tmp_path, url).copy(1) == len(data)


@everywhere
def test_replaced_checkpoint_is_copied_again(tmp_path: Path, url: str) -> None:
    fill(tmp_path, 1)
    copies(tmp_path, url).copy(1)
    fill(tmp_path, 2)
    copies(tmp_path, url).copy(2)
    DirectoryStore(tmp_path / "job").abandon(after=0)
    fill(tmp_path, 1, value=5.0)
    assert copies(tmp_path, url).pending() == [1]
    copies(tmp_path, url).copy(1)
    remote = Remote(url, job="job")
    assert remote.rounds() == [1]  # the future of the old one is withdrawn
    remote.fetch(1, tmp_path / "back" / "job")
    part = DirectoryStore(tmp_path / "back/job").get(1, names={PARTS[0]})[PARTS[0]]
    assert part.tensors["model/v"][0] == 5.0


@everywhere
def test_damaged_and_missing_parts_elsewhere_are_named(tmp_path: Path, url: str) -> None:
    fill(tmp_path, 1)
    copies(tmp_path, url).copy(1)
    files, root = fsspec.core.url_to_fs(url)
    path = f"{root}/job/{checkpoint_folder(1)}/{PARTS[1]}"
    data = files.cat_file(path)
    files.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointCorrupt, match=f"{PARTS[1]} .* was altered"):
        Remote(url, job="job").fetch(1, tmp_path / "back")
    files.rm_file(path)
    back = tmp_path / "other"
    with pytest.raises(CheckpointCorrupt, match=f"{PARTS[1]} .* is missing"):
        Remote(url, job="job").fetch(1, back)
    assert DirectoryStore(back).latest() == -1
    files.pipe_file(path, data)
    Remote(url, job="job").fetch(1, back)
    assert DirectoryStore(back).latest() == 1


def test_job_is_found_at_or_below_a_url(tmp_path: Path, url: str) -> None:
    fill(tmp_path, 3)
    copies(tmp_path, url).copy(3)
    assert locate(f"{url}/job").rounds() == locate(url).rounds() == [3]
    CheckpointCopies(tmp_path / "job", url, job="other").copy(3)
    with pytest.raises(ConfigError, match="job, other"):
        locate(url)


def test_trouble_is_reported_and_the_copy_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.checkpoint.background.copies.FIRST_PAUSE_S", 0.05)
    fill(tmp_path, 1)
    blocked = tmp_path / "elsewhere"
    blocked.write_text("a file where a folder should be")

    def report(message: Report) -> None:
        reports(message)
        if isinstance(message, CopyFailed):
            blocked.unlink(missing_ok=True)

    reports = Reports()
    copy_all(copies(tmp_path, str(blocked)), report=report)
    assert [type(message) for message in reports.all] == [CopyFailed, Copied]
    assert Remote(str(blocked), job="job").rounds() == [1]


def test_checkpoint_that_is_deleted_meanwhile_is_passed_over(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    fill(tmp_path, 2)

    def moment(name: str) -> None:
        if name == f"{PARTS[0]} copied":
            (tmp_path / "job" / checkpoint_folder(2) / PARTS[1]).unlink(missing_ok=True)

    reports = Reports()
    copy_all(CheckpointCopies(tmp_path / "job", str(tmp_path / "e"), moment=moment), report=reports)
    assert [r.round for r in reports.all if isinstance(r, Copied)] == [1]


def test_journal_of_another_place_does_not_count(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    copies(tmp_path, str(tmp_path / "one")).copy(1)
    assert copies(tmp_path, str(tmp_path / "two")).pending() == [1]
    (tmp_path / "job" / JOURNAL).write_bytes(b"{")
    assert copies(tmp_path, str(tmp_path / "one")).pending() == [1]
    copies(tmp_path, str(tmp_path / "one")).copy(1)
    journal = msgspec.json.decode((tmp_path / "job" / JOURNAL).read_bytes(), type=Journal)
    assert journal.rounds[1].done


def test_successor_of_a_copying_writer_continues_the_copy(tmp_path: Path) -> None:
    blocked = tmp_path / "elsewhere"
    blocked.write_text("a file where a folder should be")
    target = FolderTarget(folder=str(tmp_path / "job"), to=str(blocked))
    events = Events()
    saver = BackgroundSaver(target, scratch=tmp_path, on_event=events)
    save(saver, 1)
    assert "round 1 is not copied yet" in events.until("checkpoint-copy-failed").text
    assert newest(tmp_path) == 1
    until_written(saver)  # the copy may fail before the saver has heard that: 2 would be skipped
    save(saver, 2)
    until_written(saver)
    assert saver.close(0.1)  # the checkpoint is safe; the copy is another matter
    assert newest(tmp_path) == 2
    blocked.unlink()
    successor = BackgroundSaver(target, scratch=tmp_path, on_event=events)
    events.until("checkpoint-copied", count=2)
    assert successor.close(WAIT_S)
    assert Remote(str(blocked), job="job").rounds() == [1, 2]


@pytest.mark.skipif(os.name != "posix", reason="kills processes")
def test_killed_copy_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    task = {"folder": str(tmp_path / "job"), "url": str(tmp_path / "e"), "job": "job"}
    code = """
import os, signal, sys
from atoll.checkpoint.background import copies
left = int(sys.argv[1])
def moment(name):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
folder = copies.CheckpointCopies
copies.CheckpointCopies = lambda *a, **k: folder(*a, **k, moment=moment)
copies.run(*copies.lower_priority())
os._exit(0)
"""
    for point in range(9):
        done = subprocess.Popen(
            [sys.executable, "-c", code, str(point)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert done.stdin is not None
        assert done.stdout is not None
        done.stdin.write(msgspec.json.encode(task) + b"\n")
        done.stdin.flush()
        output = done.stdout.read()
        status = done.wait(timeout=WAIT_S)
        for pipe in (done.stdin, done.stdout):
            pipe.close()
        rounds = Remote(str(tmp_path / "e"), job="job").rounds()
        if status == 0:
            assert b'"Copied"' in output
            break
        assert status == -signal.SIGKILL
        if rounds:
            Remote(str(tmp_path / "e"), job="job").fetch(1, tmp_path / f"back{point}")
    assert rounds == [1]


def test_unknown_scheme_and_missing_driver_are_named() -> None:
    with pytest.raises(ConfigError, match="cannot be used for checkpoints"):
        Remote("nosuch://user:secret@place/x")
    with pytest.raises(ConfigError) as raised:
        Remote("nosuch://user:secret@place/x")
    assert "secret" not in str(raised.value)
    assert hidden("s3://a:b@c/d") == "s3://c/d"


def test_store_that_refuses_is_told_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="reported an error"):
        Remote(str(tmp_path / "file" / "below")).write("name", b"x")


def test_an_empty_secret_hides_nothing() -> None:
    assert hiding({"KEY": "", "TOKEN": "abc"})("x abc y") == "x (secret TOKEN) y"


def test_many_threads_may_wake_one_copier(tmp_path: Path) -> None:
    from atoll.checkpoint.background.copies import Copier
    from atoll.checkpoint.background.messages import WriterIdle

    for round_ in (1, 2, 3):
        fill(tmp_path, round_)
    idle = threading.Event()
    copier = Copier(
        copies(tmp_path, str(tmp_path / "e")),
        report=lambda report: idle.set() if isinstance(report, WriterIdle) else None,
    )
    for _ in range(20):
        copier.wake()
    assert idle.wait(WAIT_S)
    assert Remote(str(tmp_path / "e"), job="job").rounds() == [1, 2, 3]
