"""The hub's secrets are made once, and a damaged file is not replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import AuthError
from atoll.hub.security.hub_secrets import FILE, load_or_make, save


def test_stored_secrets_are_found_again(tmp_path: Path) -> None:
    made = load_or_make(tmp_path)
    assert made != load_or_make(tmp_path)  # not stored yet
    save(tmp_path, made)
    assert load_or_make(tmp_path) == made


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"ticket": 1}'])
def test_a_damaged_file_is_named_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(AuthError, match="cannot be read") as raised:
        load_or_make(tmp_path)
    assert str(tmp_path / FILE) in str(raised.value)
    assert (tmp_path / FILE).read_bytes() == content
