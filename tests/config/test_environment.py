"""Where Atoll keeps things."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll import config


def test_cache_follows_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.cache() == tmp_path / "atoll"


def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("ATOLL_HOME", "")
    assert config.home() == tmp_path / "atoll"


def test_user_without_a_home_gets_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    assert config.cache() == tmp_path / "cache"
