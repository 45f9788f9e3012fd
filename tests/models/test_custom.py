from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.checkpoint import load_weights
from atoll.config import parse_spec
from atoll.errors import ConfigError
from atoll.group.single import SingleGroup
from atoll.strategies.inner.pipeline.stages import chain_of
from atoll.train.build import build
from atoll.train.results.sample import load_model
from tests.train.members import train_member

NETS = """
import torch
from torch import nn

def tower(*, vocab_size, width=16, context):
    return nn.Sequential(nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size))

class Odd(nn.Module):
    context = 16
    def __init__(self, vocab_size):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.table = nn.Embedding(vocab_size, vocab_size)
    def forward(self, ids):
        return self.scale * self.table(ids)

def number():
    return 7
"""

JOB = """
[job]
threads = 0
[model]
name = "{name}"
{options}
[data]
corpus = "files:{text}"
[train]
steps = 4
batch = 2
eval_tokens = 64
[strategy]
preset = "alone"
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets_of_a_test.py").write_text(NETS)
    (tmp_path / "text.txt").write_text("to be, or not to be: that is the question. " * 400)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("nets_of_a_test", None)


def built(folder: Path, name: str, options: str = "") -> Any:
    text = JOB.format(name=f"nets_of_a_test:{name}", options=options, text=folder / "text.txt")
    return build(parse_spec(text), member="w0", slot=0, num_slots=1).model


def test_factory_gets_the_keys_of_the_table_and_the_vocabulary(nets: Path) -> None:
    model = built(nets, "tower", "width = 8\ncontext = 32")
    assert model.config.context == 32
    assert list(model.state_dict()) == ["0.weight", "1.weight", "1.bias"]
    assert model.get_parameter("0.weight").shape == (256, 8)
    units, sure = chain_of(model)
    assert len(units) == 2  # a pipeline can cut it
    assert sure
    ids = torch.randint(0, 256, (2, 32))
    expected = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    assert torch.equal(model.loss(ids, ids), expected)


def test_trainer_trains_it(nets: Path) -> None:
    text = JOB.format(name="nets_of_a_test:tower", options="context = 16", text=nets / "text.txt")
    result = train_member(parse_spec(text), SingleGroup(), nets / "run")
    assert result["steps"] == 4
    weights = load_weights(nets / "run" / "model.safetensors")
    assert (weights.model, weights.options) == ("nets_of_a_test:tower", {"context": 16})
    with pytest.raises(ConfigError, match="load_weights"):
        load_model(nets / "run" / "model.safetensors")


def test_pipeline_says_what_a_model_lacks(nets: Path) -> None:
    with pytest.raises(ConfigError, match=r"scale.*units\(\)"):
        chain_of(built(nets, "Odd"))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("towre", "", "there is no 'towre'"),
        ("number", "context = 8", "does not take these options"),
        ("number", "", "returned no model"),
        ("tower", "context = 8\ndepth = 3", "does not take these options.*depth"),
        ("tower", "", "does not take these options.*context"),
    ],
)
def test_wrong_factories_are_named(nets: Path, name: str, options: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        built(nets, name, options)


def test_missing_module_names_the_code_of_the_job(nets: Path) -> None:
    text = JOB.format(name="no_such_module:x", options="", text=nets / "text.txt")
    with pytest.raises(ConfigError, match=r"code = .*in \[job\]"):
        build(parse_spec(text), member="w0", slot=0, num_slots=1)


def test_model_of_a_job_is_code_that_an_owner_must_allow() -> None:
    assert parse_spec('[model]\nname = "nets:tower"\n').permission == "script"
    assert parse_spec("").permission == "trainer"


@pytest.mark.parametrize(
    "table",
    [
        'ranks = 2\n[strategy]\ninner = "pipeline"\n',
        'mesh = {pipeline = 2, shard = 2}\n[strategy]\ninner = "hybrid"\n',
    ],
)
def test_script_with_a_pipeline_is_refused(table: str) -> None:
    text = f'[job]\nscript = "a.py"\n[island]\n{table}'
    with pytest.raises(ConfigError, match="cannot be cut into a pipeline"):
        parse_spec(text)
