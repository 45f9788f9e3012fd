"""A file that was put in place is still there after a power cut, and so are its folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.hub.storage import upload


def test_every_new_folder_is_flushed_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(upload, "flush_folder", flushed.append)
    target = tmp_path / "job" / "checkpoints" / "round-1" / "part"
    (tmp_path / "job").mkdir()
    for content in ("old", "new"):
        temporary = tmp_path / "temporary"
        temporary.write_text(content)
        assert upload.put_in_place(temporary, target).st_size == 3
    assert target.read_text() == "new"
    first = [target.parent, target.parent.parent, target.parent.parent.parent]
    assert flushed == [*first, target.parent]
