"""Job files: what is accepted, and that every refusal names its table, key and remedy."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import dump_spec, parse_spec, read_spec
from atoll.errors import ConfigError
from tests.tiers import examples

EXAMPLES = sorted(
    path
    for path in (Path(__file__).parents[2] / "examples").rglob("*.toml")
    if not {"jobs", "sweep", "hub", "machines"} & set(tomllib.loads(path.read_text("utf-8")))
)
RESOLVED = [tomllib.loads(dump_spec(parse_spec(path.read_text("utf-8")))) for path in EXAMPLES]

VALUES = st.one_of(
    st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.lists(st.text(max_size=4), max_size=2), st.dictionaries(st.text(max_size=4), st.integers()),
    st.sampled_from(["auto", "relay", "process", "container", "fp16", "shrink", "torch:Lion"]),
)  # fmt: skip


def text_of(table: str, key: str, value: str) -> str:
    more = '[[rl.policies]]\nname = "p"\nenv = "CartPole-v1"\n' if table == "rl" else ""
    return f"[{table}]\n{key} = {value}\n{more}"


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_a_changed_file_is_read_or_refused_by_its_key(data: st.DataObject) -> None:
    tables = data.draw(st.sampled_from(RESOLVED))
    table = data.draw(st.sampled_from(sorted(name for name in tables if tables[name])))
    key = data.draw(st.sampled_from(sorted(tables[table])))
    changed: dict[str, Any] = {**tables, table: {**tables[table], key: data.draw(VALUES)}}
    try:
        spec = read_spec(changed)
    except ConfigError:
        return
    assert repr(parse_spec(dump_spec(spec))) == repr(spec)  # by text: nan is not itself


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_a_value_of_a_wrong_type_is_refused_with_its_place(data: st.DataObject) -> None:
    tables = data.draw(st.sampled_from(RESOLVED))
    closed = sorted(name for name in tables if name not in ("model", "strategy"))
    table = data.draw(st.sampled_from(closed))
    key = data.draw(st.sampled_from(sorted(tables[table])))
    wrong: Any = "text" if not isinstance(tables[table][key], str) else 3
    with pytest.raises(ConfigError) as refused:
        read_spec({**tables, table: {**tables[table], key: wrong}})
    message = f"{key} in [{table}] has the wrong type; given: {wrong!r}; expected: "
    assert message in str(refused.value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_the_same_job_when_written_out(path: Path) -> None:
    spec = parse_spec(path.read_text("utf-8"))
    assert parse_spec(dump_spec(spec)) == spec


@pytest.mark.parametrize(
    ("table", "key", "right", "wrong", "message"),
    [
        ("job", "nodes", "1", "0", "is too small; given: 0; expected: more than 0"),
        ("job", "retries", "0", "-1", "must not be negative; given: -1"),
        ("job", "route", '"relay"', '"relax"', "did you mean 'relay'?"),
        ("needs", "cores", "0.5", "-0.5", "must not be negative; given: -0.5"),
        ("needs", "disk_gb", "1", "inf", "must be finite"),
        ("train", "lr", "0.1", "inf", "must be finite; given: inf; expected: a number"),
        ("needs", "labels", '["a"]', "[1]", "expected: a list of str"),
        ("needs", "labels", "[]", '"a"', "expected: a list"),
        ("launch", "pull", '"never"', '"newer"', "did you mean 'never'?"),
        ("launch", "network", '"bridge"', '"bridge\\n"', "expected: one of bridge, host, none"),
        ("train", "steps", "1", "0", "is too small"),
        ("train", "steps", "3", "3.0", "has the wrong type; given: 3.0; expected: int"),
        ("train", "steps", "3", "true", "has the wrong type; given: True; expected: int"),
        ("train", "lr", "1", "0", "is too small"),
        ("train", "lr", "1e-3", "nan", "must be finite; given: nan"),
        ("train", "precision", '"bf16"', '"bf6"', "did you mean 'bf16'?"),
        ("train", "pace", '"equal"', '"even"', "expected: one of equal, measured"),
        ("train", "optimizer", '"torch:Lion"', '"muom"', "did you mean 'muon'?"),
        ("train", "options", "{eps = 1}", "1", "expected: a table"),
        ("train", "betas", "[0.9, 0.95]", "[0.9, nan]", "must be finite; given: [0.9, nan]"),
        ("strategy", "inner", '"local"', '"hybird"', "did you mean 'hybrid'?"),
        ("checkpoint", "keep", "1", "0", "is too small"),
        ("job", "device", '"cuda:1"', '"gpu"', "expected: auto, cpu, or an accelerator: cuda,"),
        ("job", "device", '"xpu"', '"cuda:"', "expected: auto, cpu, or an accelerator"),
        ("island", "on_loss", '"shrink"', '"shrunk"', "did you mean 'shrink'?"),
        ("island", "timeout_s", "0.1", "0", "is too small"),
        ("rl", "algorithm", '"grpo"', '"gppo"', "did you mean 'ppo'?"),
        ("rl", "critic", '"own"', '"mine"', "expected: one of"),
        ("rl", "gamma", "1", "1.1", "is out of range; given: 1.1; expected: 0 to 1"),
        ("rl", "kl", "0", "-1", "must not be negative"),
        ("rl", "rollout", "1", "0", "is too small"),
    ],
)
def test_ranges_and_choices_hold_at_their_borders(
    table: str, key: str, right: str, wrong: str, message: str
) -> None:
    parse_spec(text_of(table, key, right))
    with pytest.raises(ConfigError) as refused:
        parse_spec(text_of(table, key, wrong))
    assert f"{key} in [{table}]" in str(refused.value)
    assert message in str(refused.value)


def test_an_unknown_key_is_refused_in_a_table_in_a_list() -> None:
    with pytest.raises(ConfigError, match=r"unknown key in policies in \[rl\].*did you mean 'env'"):
        parse_spec('[[rl.policies]]\nname = "p"\nenvs = "CartPole-v1"\n')
    with pytest.raises(ConfigError, match=r"policies in \[rl\] has the wrong type"):
        parse_spec('[rl]\npolicies = ["p"]\n')


def test_text_that_toml_must_escape_survives_being_written() -> None:
    spec = read_spec({"job": {"script": 'a"\\\n\x1f\x7f\u00e9.py'}, "model": {"a b": 1, "c": "\t"}})
    assert parse_spec(dump_spec(spec)) == spec


ELASTIC = '[strategy]\ninner = "pipeline"\n[island]\nranks = 4\nelastic = true\n'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"pipeline"', '"fsdp"', "inner = 'fsdp'.*elastic = false"),
        ("ranks = 4", "mesh = {pipeline = 2}", "leave out mesh in"),
        ("ranks = 4", "ranks = 4\ncuts = [1, 2, 3]", r"leave out cuts in \[island\]"),
        ("ranks = 4", "ranks = 4\nmicrobatches = 4", "leave out microbatches"),
    ],
)
def test_elastic_pipelines_choose_by_themselves(old: str, new: str, message: str) -> None:
    assert parse_spec(ELASTIC).island.may_shrink
    assert not parse_spec(ELASTIC.replace("true", "false")).island.may_shrink
    with pytest.raises(ConfigError, match=message):
        parse_spec(ELASTIC.replace(old, new) + "[train]\nbatch = 16\n")
