"""One file knows what only some systems have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atoll.system import flush_folder, try_lock

PACKAGE = Path(__file__).resolve().parent.parent / "atoll"
ONLY_THERE = re.compile(r"\b(fcntl|msvcrt|termios|grp|killpg|prctl|PR_SET_\w+|os\.fork|setsid)\b")


def test_what_only_some_systems_have_is_in_one_file() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in ONLY_THERE.findall(path.read_text(encoding="utf-8"))
        if path != PACKAGE / "system.py"
    ]
    assert not found


def test_a_lock_excludes_others_and_a_shared_one_does_not(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as other:
        try_lock(one.fileno(), shared=True)
        try_lock(other.fileno(), shared=True)
        with pytest.raises(OSError, match=r"unavailable|denied"):
            try_lock(other.fileno(), shared=False)


def test_a_folder_that_is_not_there_is_no_silent_success(tmp_path: Path) -> None:
    flush_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        flush_folder(tmp_path / "none")
