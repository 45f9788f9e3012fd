from __future__ import annotations

import pytest

from atoll.cli import precheck
from atoll.errors import ConfigError


def test_a_machine_without_torch_is_told_so_before_it_becomes_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    precheck.check_can_train()
    monkeypatch.setattr(precheck, "torch_version", lambda: "")
    with pytest.raises(ConfigError, match=r"cannot train.*atoll\[train\]"):
        precheck.check_can_train()
