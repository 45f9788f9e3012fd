"""Settings that language models do not have are refused before a machine is asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from atoll.config.rl_tables import PolicyTable
from atoll.config.tables import ModelTable
from atoll.errors import ConfigError
from atoll.rl import compatibility
from atoll.rl.text.compatibility import check_text
from tests.rl.text.small import job, rl_table


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"critic": "joint"}, "joint"),
        ({"critic": "corrected"}, "corrected"),
        ({"values": "service"}, "values"),
        ({"pool": "pool/texts"}, "pool"),
        ({"recurrent": 8}, "recurrent"),
        ({"algorithm": "grpo", "group": 1}, "group = 1"),
        ({"policies": [PolicyTable(name="one", env="text:riddles")]}, "riddles"),
        ({"policies": [PolicyTable(name="one", env="text:brackets", options={"most": 0})]}, "most"),
    ],
)
def test_what_text_has_not_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_text(job(rl_table(**changes)))


def test_other_models_are_refused() -> None:
    spec = dataclasses.replace(job(rl_table()), model=ModelTable(name="other"))
    with pytest.raises(ConfigError, match="cannot learn from rewards"):
        check_text(spec)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"critic": "own"},
        {"critic": "unconditioned"},
        {"algorithm": "grpo"},
        {"algorithm": "grpo", "critic": "none"},
        {"policies": [PolicyTable(name="one", env="text:only_on_nodes:make")]},
    ],
)
def test_what_text_has_is_taken(changes: dict[str, Any]) -> None:
    check_text(job(rl_table(**changes)))
    compatibility.check(job(rl_table(**changes)))
