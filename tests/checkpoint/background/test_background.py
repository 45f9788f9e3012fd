"""Saving in the background: only the copy blocks, nothing accepted is lost, all ends in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from atoll.checkpoint import (
    SHARED,
    BackgroundSaver,
    DirectoryStore,
    FolderTarget,
    HubTarget,
    Part,
    Saved,
    SavePoint,
    Skipped,
)
from atoll.checkpoint import shared_memory as memory_module
from atoll.checkpoint.background.child import NICENESS
from atoll.checkpoint.shared_memory import PREFIX
from atoll.errors import CheckpointError
from tests.checkpoint.savers import WAIT_S, Events, newest, save, target
from tests.patience import PATIENCE_S, PROMPT_S
from tests.small_disk import small_disk

posix = pytest.mark.skipif(os.name != "posix", reason="stops processes by signals")


def until_writer(saver: BackgroundSaver) -> psutil.Process:
    deadline = time.monotonic() + WAIT_S
    while not saver.writer_pid:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return psutil.Process(saver.writer_pid)


def freeze(saver: BackgroundSaver) -> psutil.Process:
    """Stop a writer that has taken its place."""
    process = until_writer(saver)
    process.suspend()
    return process


def test_what_was_copied_is_written_and_not_what_it_became(tmp_path: Path) -> None:
    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path)
    values = torch.full((50_000,), 1.0)
    part = [Part(SHARED, {"model/v": values}), Part("w0.safetensors", {"v": values[:9]})]
    saved = saver.save(SavePoint(1, 10, "w0", ["w0"]), part)
    values.fill_(9.0)
    assert isinstance(saved, Saved)
    assert saved.nbytes > 200_000
    assert saver.close(WAIT_S)
    assert newest(tmp_path) == 1
    manifest = DirectoryStore(tmp_path / "job").manifest(1)
    assert manifest.versions["torch"] == torch.__version__


def test_images_are_reused_and_grow(tmp_path: Path) -> None:
    events = Events()
    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path, on_event=events)
    for round_, elements in enumerate((10, 100_000, 7, 300_000), start=1):
        assert isinstance(save(saver, round_, elements=elements), Saved)
        assert saver.wait(WAIT_S)
        assert newest(tmp_path) == round_
    assert saver.close(WAIT_S)
    assert events.all == []


@posix
def test_only_the_final_save_waits_for_a_running_write(
    tmp_path: Path,
) -> None:
    events = Events()
    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path, on_event=events)
    writer = freeze(saver)
    assert isinstance(save(saver, 1), Saved)
    assert isinstance(save(saver, 2), Skipped)
    assert "round 2 is skipped" in events.until("checkpoint-skipped").text
    assert isinstance(save(saver, 3, final=True), Saved)
    assert not saver.wait(0.05)
    writer.resume()
    assert saver.close(WAIT_S)
    assert newest(tmp_path) == 3
    assert sorted(DirectoryStore(tmp_path / "job")._files.complete()) == [1, 3]


@posix
def test_close_ends_in_time_although_the_writer_is_frozen(tmp_path: Path) -> None:
    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path)
    writer = freeze(saver)
    save(saver, 1)
    began = time.monotonic()
    assert not saver.close(0.2)
    assert time.monotonic() - began < PROMPT_S
    assert not writer.is_running()
    assert isinstance(save(saver, 2), Skipped)


def test_same_state_again_is_not_written_again(tmp_path: Path) -> None:
    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path)
    assert save(saver, 1) == save(saver, 1, final=True)
    assert saver.close(WAIT_S)
    assert newest(tmp_path) == 1


@posix
def test_successor_of_a_killed_writer_writes_the_newest_image(tmp_path: Path) -> None:
    events = Events()
    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path, on_event=events)
    first = freeze(saver)
    save(saver, 1)
    save(saver, 2, final=True)
    first.kill()
    assert saver.wait(WAIT_S)
    assert newest(tmp_path) == 2
    assert events.kinds() == ["checkpoint-writer-restarted"]
    assert saver.writer_pid != first.pid
    assert saver.close(WAIT_S)


@posix
def test_writer_killed_while_idle_costs_nothing(tmp_path: Path) -> None:
    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path)
    save(saver, 1)
    assert saver.wait(WAIT_S)
    psutil.Process(saver.writer_pid).kill()
    save(saver, 2)
    assert saver.close(WAIT_S)
    assert newest(tmp_path) == 2


def test_writer_that_cannot_live_is_given_up_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.checkpoint.background.supervisor.FIRST_PAUSE_S", 0.001)
    events = Events()
    saver = BackgroundSaver(
        target(tmp_path), scratch=tmp_path, on_event=events, command=["/bin/false"]
    )
    save(saver, 1)
    text = events.until("checkpoint-failed").text
    assert "round 1 was not saved" in text
    assert "failed repeatedly" in text
    assert not saver.wait(WAIT_S)
    assert not saver.close(0.1)


@posix
def test_writer_ignores_group_signals_and_loads_no_torch(tmp_path: Path) -> None:
    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path)
    save(saver, 1)
    assert saver.wait(WAIT_S)
    writer = psutil.Process(saver.writer_pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        writer.send_signal(number)
    assert writer.nice() == min(19, os.nice(0) + NICENESS)
    if sys.platform == "linux":
        maps = Path(f"/proc/{writer.pid}/maps").read_text()
        assert "libtorch" not in maps
    save(saver, 2)
    assert saver.close(WAIT_S)
    assert newest(tmp_path) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_full_disk_is_told_and_the_next_one_that_fits_is_saved(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, nbytes=3 * 2**20):
        events = Events()
        saver = BackgroundSaver(target(disk), scratch=tmp_path, on_event=events)
        save(saver, 1)
        assert saver.wait(WAIT_S)
        assert isinstance(save(saver, 2, elements=2**19), Saved)
        assert not saver.wait(WAIT_S)
        assert "disk is full" in events.until("checkpoint-failed").text
        assert newest(disk) == 1
        save(saver, 3)
        assert saver.close(WAIT_S)
        assert newest(disk) == 3


def test_short_memory_is_replaced_by_a_file_that_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "memory_room", lambda: 0)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / f"{PREFIX}of-a-killed-one").write_bytes(b"x")
    (scratch / "mine").write_bytes(b"x")
    saver = BackgroundSaver(target(tmp_path), scratch=scratch)
    save(saver, 1)
    assert saver.wait(WAIT_S)
    names = sorted(path.name for path in scratch.iterdir())
    assert len(names) == 2
    assert names[0].startswith(PREFIX)
    save(saver, 2, elements=100_000)
    assert saver.close(WAIT_S)
    assert [path.name for path in scratch.iterdir()] == ["mine"]
    assert newest(tmp_path) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_training_continues_without_room_for_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "memory_room", lambda: 0)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with small_disk(scratch, nbytes=1 * 2**20):
        events = Events()
        saver = BackgroundSaver(target(tmp_path), scratch=scratch, on_event=events)
        assert isinstance(save(saver, 1, elements=2**20), Skipped)
        assert "no room for its image" in events.until("checkpoint-skipped").text
        assert isinstance(save(saver, 2), Saved)
        assert saver.close(WAIT_S)
    assert newest(tmp_path) == 2


def test_an_image_that_is_made_is_not_moved_before_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moment(name: str) -> None:
        if name == "image made":
            monkeypatch.setattr(memory_module, "memory_room", lambda: 0)
            saver.reserve(2**24)
            for thread in threading.enumerate():
                if thread.name == "checkpoint-memory":
                    thread.join(0.3)  # it waits for the end of the save

    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path, moment=moment)
    assert isinstance(save(saver, 1), Saved)
    assert saver.close(WAIT_S)
    assert newest(tmp_path) == 1


def test_memory_can_be_had_ahead_of_time(tmp_path: Path) -> None:
    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path)
    saver.reserve(2**24)
    assert isinstance(save(saver, 1, elements=2**20), Saved)
    assert saver.close(WAIT_S)
    assert newest(tmp_path) == 1


def test_the_best_are_kept_beside_the_newest_and_every_nth(tmp_path: Path) -> None:
    rule = FolderTarget(folder=str(tmp_path / "job"), keep=1, keep_every=4, keep_best=1)
    saver = BackgroundSaver(rule, scratch=tmp_path)
    for round_, score in enumerate((3.0, 1.0, 2.0, None, 2.5, float("nan"), 4.0), start=1):
        save(saver, round_, score=score)
        assert saver.wait(WAIT_S)
    assert saver.close(WAIT_S)
    complete = DirectoryStore(tmp_path / "job")._files.complete()
    assert sorted(complete) == [2, 4, 7]
    assert [complete[r].score for r in (2, 4, 7)] == [1.0, None, 4.0]


def test_several_members_complete_one_checkpoint(tmp_path: Path) -> None:
    members = ("w0", "w1", "w2")
    savers = {
        member: BackgroundSaver(target(tmp_path), scratch=tmp_path / member) for member in members
    }
    for member in reversed(members):
        save(savers[member], 4, member=member, members=members)
    assert all([saver.close(WAIT_S) for saver in savers.values()])
    assert newest(tmp_path) == 4
    assert DirectoryStore(tmp_path / "job").manifest(4).members == list(members)


def test_members_of_different_states_complete_none(tmp_path: Path) -> None:
    members = ("w0", "w1")
    for member in members:
        saver = BackgroundSaver(target(tmp_path), scratch=tmp_path / member)
        save(saver, 4, member=member, members=members, base=f"of {member}")
        assert saver.close(WAIT_S)
    assert DirectoryStore(tmp_path / "job").latest() == -1


def test_hub_needs_somebody_who_announces(tmp_path: Path) -> None:
    hub = HubTarget(url="http://127.0.0.1:9", token="t", job="j")
    with pytest.raises(CheckpointError, match="publish"):
        BackgroundSaver(hub, scratch=tmp_path)


def test_tensor_that_cannot_be_saved_is_named_at_once(tmp_path: Path) -> None:
    saver = BackgroundSaver(target(tmp_path), scratch=tmp_path)
    part = Part(SHARED, {"model/v": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="model/v"):
        saver.save(SavePoint(1, 1, "w0", ["w0"]), [part])
    assert isinstance(save(saver, 2), Saved)
    assert saver.close(WAIT_S)


def test_writer_imports_no_torch() -> None:
    code = "import sys, atoll.checkpoint.background.writer, atoll.checkpoint.background.copies\n"
    code += "sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode
        == 0
    )
