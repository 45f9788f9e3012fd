"""What a machine keeps of its join."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.node.identity.identity import Identity, load_identity, save_identity, write_secret

HUB = "http://10.0.0.1:7700"


def test_saved_identity_is_found_again_and_belongs_to_its_hub(tmp_path: Path) -> None:
    me = Identity(hub=HUB, node="kitchen-1", token="secret")
    save_identity(tmp_path, me)
    assert load_identity(tmp_path, hub=HUB) == me
    assert load_identity(tmp_path, hub="http://other:1") is None


def test_identities_at_two_hubs_do_not_disturb_each_other(tmp_path: Path) -> None:
    first = Identity(hub=HUB, node="a", token="1")
    second = Identity(hub="http://other:1", node="b", token="2")
    save_identity(tmp_path, first)
    save_identity(tmp_path, second)
    assert load_identity(tmp_path, hub=HUB) == first
    assert load_identity(tmp_path, hub="http://other:1") == second


def test_only_the_owner_may_read_the_token(tmp_path: Path) -> None:
    save_identity(tmp_path, Identity(hub=HUB, node="a", token="1"))
    assert stat.S_IMODE((tmp_path / "node.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "{", "[]", '{"http://10.0.0.1:7700": {"odd": 1}}'])
def test_damaged_identity_file_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "node.json").write_text(content)
    assert load_identity(tmp_path, hub=HUB) is None


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*ATOLL_HOME"):
        write_secret(blocked / "inside" / "node.json", "{}")
