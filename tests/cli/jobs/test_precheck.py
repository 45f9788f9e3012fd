from __future__ import annotations

import pytest

from atoll.cli.jobs import precheck
from atoll.config import read_spec
from atoll.errors import ConfigError, DataError


def test_machine_without_torch_is_refused_as_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    precheck.check_can_train()
    monkeypatch.setattr(precheck, "torch_version", lambda: "")
    with pytest.raises(ConfigError, match=r"cannot train.*atoll\[train\]"):
        precheck.check_can_train()


def test_model_that_cannot_take_the_data_is_refused() -> None:
    spec = read_spec({"model": {"name": "vit"}, "data": {"corpus": "stdlib"}})
    with pytest.raises(ConfigError, match=r"cannot be trained on these data.*gpt, gpt2, llama"):
        precheck.check_names(spec)


def test_pretrained_model_may_be_on_other_machines_only() -> None:
    spec = read_spec({"model": {"name": "transformers", "source": "/models/not/here"}})
    assert precheck.check_names(spec) == 0
    with pytest.raises(DataError, match="model folder does not exist"):
        precheck.check_names(spec, here=True)
