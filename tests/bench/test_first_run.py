"""`bench.first_run` without installing anything: what it refuses, and what commands get."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import first_run
from bench.first_run import Failed, Place, built_wheel, size_mb


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, wheel=Path("none.whl"), python=sys.executable, cold=True)


def test_a_step_that_fails_says_which_and_what_it_printed(place: Place) -> None:
    with pytest.raises(Failed, match=r"ended with 3: no such thing"):
        place.run(sys.executable, "-c", "print('no such thing'); raise SystemExit(3)")


def test_commands_see_neither_this_clone_nor_its_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "ATOLL_HUB"):
        monkeypatch.setenv(name, "/here")
    fresh = Place(tmp_path, wheel=Path("none.whl"), python=sys.executable, cold=True)
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    seen = json.loads(fresh.run(sys.executable, "-c", show))
    assert "/here" not in seen.values()
    for name in ("ATOLL_HOME", "PIP_CACHE_DIR", "UV_CACHE_DIR"):
        assert Path(seen[name]).is_relative_to(tmp_path)


def test_one_wheel_must_have_been_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "ROOT", tmp_path)
    with pytest.raises(Failed, match=r"0 wheels instead of one: make dist"):
        built_wheel()
    (tmp_path / "dist").mkdir()
    wheel = tmp_path / "dist" / "atoll-1-py3-none-any.whl"
    wheel.write_bytes(b"x" * 2_000_000)
    assert built_wheel() == wheel
    assert size_mb(tmp_path) == 2.0
