"""Commands on a machine whose disk is full say so; none calls it a bug."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.errors import StorageFull
from atoll.hub.db.database import Database
from tests.small_disk import fill, small_disk

KB = 1024


@pytest.mark.parametrize("spare", [0, 4 * KB, 64 * KB])
@pytest.mark.parametrize("words", [["hub", "--port", "0"], ["demo"], ["up"]])
def test_start_on_a_full_disk_names_it(
    words: list[str],
    spare: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, nbytes=400 * KB):
        filler = fill(disk)
        with filler.open("rb+") as file:
            file.truncate(filler.stat().st_size - spare)
        monkeypatch.setenv("ATOLL_HOME", str(disk / "home"))
        with monkeypatch.context() as inside:
            inside.chdir(disk)
            with pytest.raises(SystemExit) as ended:
                main(words)
    assert ended.value.code not in (0, 70)
    said = capsys.readouterr().err
    assert "no room" in said
    assert "free some space" in said


def test_database_on_a_full_disk_is_no_broken_database(tmp_path: Path) -> None:
    with small_disk(tmp_path, nbytes=64 * KB):
        fill(tmp_path)
        with pytest.raises(StorageFull, match="no room is left"):
            Database(tmp_path / "hub.sqlite")
