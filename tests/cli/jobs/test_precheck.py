from __future__ import annotations

import pytest

from atoll.cli.jobs import precheck
from atoll.config import read_spec
from atoll.errors import ConfigError, DataError
from atoll.strategies.inner.options import check_island


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


MODEL: dict[str, object] = {"name": "gpt", "tie": False}


@pytest.mark.parametrize(
    ("strategy", "island", "message"),
    [
        ({}, {"activations": "int8"}, r'activations in \[island\][\s\S]*inner = "pipeline"'),
        ({}, {"schedule": "async"}, r'schedule in \[island\][\s\S]*inner = "pipeline"'),
        ({"inner": "fsdp"}, {"ranks": 2, "cuts": [1]}, r"cuts in \[island\][\s\S]*shard=2"),
    ],
)
def test_options_of_pipelines_need_one(
    strategy: dict[str, str], island: dict[str, object], message: str
) -> None:
    spec = read_spec({"strategy": strategy, "island": island})
    with pytest.raises(ConfigError, match=message):
        precheck.check_names(spec)


def test_a_swarm_has_its_own_codec_of_activations() -> None:
    strategy = {"inner": "swarm", "outer": "every_step"}
    island, swarm = {"activations": "int8"}, {"stages": 2}
    spec = read_spec({"job": {"nodes": 2}, "strategy": strategy, "swarm": swarm, "island": island})
    with pytest.raises(ConfigError, match=r"codec in \[swarm\]"):
        check_island(spec)


def test_whole_members_beside_stages_in_a_subspace_are_refused() -> None:
    swarm = {"stages": 2, "codec": "subspace:4", "whole": 1}
    strategy = {"inner": "swarm", "outer": "diloco"}
    spec = read_spec({"job": {"nodes": 5}, "strategy": strategy, "swarm": swarm})
    with pytest.raises(ConfigError, match=r"out of their subspace[\s\S]*int8"):
        check_island(spec)


@pytest.mark.parametrize(
    ("island", "model", "message"),
    [
        ({"activations": "subspace:65"}, {}, "1 to 64"),
        ({"activations": "subspace:8"}, {"tie": True}, "shares the embedding"),
        ({"activations": "feedback(topk:0.1)"}, {}, "without state"),
        ({"schedule": "async"}, {"tie": True}, "two stages share a weight"),
        ({"schedule": "async"}, {}, r"looks ahead[\s\S]*AdamW"),
        ({"cuts": [9]}, {}, "cuts do not make the stages"),
        ({"ranks": 40}, {}, "more stages than the model has units"),
    ],
)
def test_pipelines_that_cannot_be_are_refused_at_once(
    island: dict[str, object], model: dict[str, object], message: str
) -> None:
    pipeline = {"strategy": {"inner": "pipeline"}}
    tables = {"island": {"ranks": 2, **island}, "model": {**MODEL, **model}}
    spec = read_spec({**pipeline, **tables})
    with pytest.raises(ConfigError, match=message):
        precheck.check_names(spec)
    assert precheck.check_names(read_spec({**pipeline, "island": {"ranks": 2}, "model": MODEL}))


def test_model_with_fewer_units_than_levels_is_refused() -> None:
    tables = {"model": {"layers": 2, "width": 16, "heads": 2}, "strategy": {"preset": "dipaco"}}
    assert precheck.check_names(read_spec({**tables, "dipaco": {"modules": [2, 2]}}))
    with pytest.raises(ConfigError, match=r"9 levels.*5 numbers in modules of \[dipaco\]"):
        precheck.check_names(read_spec({**tables, "dipaco": {"modules": [1] * 9}}))
