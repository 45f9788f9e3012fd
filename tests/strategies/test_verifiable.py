"""`trust = "audit"` is refused by name for what cannot be computed again."""

from __future__ import annotations

import pytest

from atoll.config import parse_spec
from atoll.errors import ConfigError
from atoll.strategies.compatibility import check_job

FITTING = {
    "job": {"trust": '"audit"', "nodes": "4", "route": '"relay"', "device": '"cpu"'},
    "strategy": {
        "preset": '"diloco"', "codec": '"int8"', "shared_steps": "0", "admission": '"norms"',
    },
    "train": {"steps": "100"},
}  # fmt: skip


def text(**changes: str) -> str:
    """Return a fitting job with `TABLE_KEY = value` changed."""
    tables = {name: dict(table) for name, table in FITTING.items()}
    for key, value in changes.items():
        table, _, name = key.partition("_")
        tables.setdefault(table, {})[name] = value
    lines = []
    for name, keys in tables.items():
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in keys.items())]
    return "\n".join(lines)


def test_fitting_job_is_accepted() -> None:
    check_job(parse_spec(text()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"strategy_codec": '"feedback(int8)"'}, r"codec = 'feedback\(int8\)'"),
        ({"strategy_codec": '"topk:0.1"'}, "codec = 'topk"),
        ({"strategy_codec": '"feedback(randomk:1e-2)"'}, "codec = 'feedback"),
        ({"strategy_shared_steps": "20"}, "shared_steps = 20"),
        ({"strategy_drop": "0.1"}, "drop = 0.1"),
        ({"strategy_preset": '"ddp"', "strategy_codec": '"fp32"'}, "outer = 'every_step'"),
        ({"strategy_admission": '"finite"'}, "no run starts from parameters of one member"),
        ({"job_route": '"auto"'}, "route = 'auto'"),
        ({"job_device": '"auto"'}, "device = 'auto'"),
        ({"job_nodes": "2"}, "nodes = 2"),
        ({"train_precision": '"bf16"'}, "precision = 'bf16'"),
        ({"train_optimizer": '"muon"'}, "optimizer = 'muon'"),
        ({"job_audit_share": "0.5"}, "0.01 to 0.05"),
        ({"tune_data": '["a.jsonl"]', "model_path": '"folder"'}, "a model that is tuned"),
    ],
)
def test_what_cannot_be_verified_is_named(change: dict[str, str], named: str) -> None:
    if change.get("strategy_preset") == '"ddp"':
        spec = parse_spec(text(**change).replace("shared_steps = 0\n", ""))
    else:
        spec = parse_spec(text(**change))
    with pytest.raises(ConfigError, match=named):
        check_job(spec)


def test_without_the_key_nothing_is_refused() -> None:
    check_job(parse_spec(text(job_trust='"members"', job_device='"auto"', job_nodes="2")))
