"""The built-in trainer goes on with a pretrained model: its weights, its tokenizer, its names."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from atoll.checkpoint import load_weights
from atoll.config import JobSpec, read_spec
from atoll.data import Dataset, PretrainedTokenizer, Tokenizer, tokenizer_from_json
from atoll.errors import ConfigError
from atoll.group.in_process.groups import MemoryGroups
from atoll.train.build import build
from atoll.train.results.sample import load_model, write_text
from atoll.train.trainer import Trainer
from atoll.wire.messages import Registered
from tests.train.members import train_member

transformers = pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")

TEXT = "".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n" for n in range(1500))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as models are published in: a tiny llama and a byte-pair tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("pretrained")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator([TEXT[:20_000]], trainer=trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>"
    ).save_pretrained(folder)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def spec(pretrained: Path, tmp_path: Path) -> JobSpec:
    (tmp_path / "text.py").write_text(TEXT, encoding="utf-8")
    return read_spec(
        {
            "job": {"nodes": 2, "threads": 1},
            "model": {"name": "transformers", "source": str(pretrained), "context": 16},
            "data": {"corpus": f"files:{tmp_path}/*.py", "tokenizer": "model"},
            "train": {"steps": 12, "batch": 8, "lr": 0.01, "warmup": 2, "eval_tokens": 512},
            "strategy": {"preset": "local-sgd", "every": 4},
        }
    )


def tokenizer_of(spec: JobSpec) -> Tokenizer:
    dataset = build(spec, member="w0", slot=0, num_slots=1).dataset
    assert isinstance(dataset, Dataset)
    return dataset.tokenizer


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members that are threads load their weights in turn: the library has global switches."""
    lock, prepare = threading.Lock(), Trainer.prepare

    def in_turn(self: Trainer, start: Registered) -> None:
        with lock:
            prepare(self, start)

    monkeypatch.setattr(Trainer, "prepare", in_turn)


def test_two_members_go_on_with_one_pretrained_model(
    spec: JobSpec, pretrained: Path, tmp_path: Path
) -> None:
    groups = MemoryGroups(2)
    for group in groups:
        (tmp_path / group.me).mkdir()
    first, second = groups.together(lambda group: train_member(spec, group, tmp_path / group.me))
    assert first["digest"] == second["digest"]
    assert first["loss_final"] < 0.9 * first["first_loss_sum"] / first["first_tokens"]
    assert first["sample"].startswith("def ")
    assert first["bytes_per_token"] > 1.2

    path = tmp_path / "w0" / "model.safetensors"
    model, tokenizer = load_model(path)
    assert write_text(model, tokenizer, "def f1", tokens=4, seed=1).startswith("def f1")

    # The names are the library's: what was trained goes back where it came from.
    weights = load_weights(path)
    config = transformers.AutoConfig.from_pretrained(pretrained)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.load_state_dict(weights.state)
    ids = tokenizer.encode(b"def f(x):").long()[None]
    assert torch.equal(theirs(ids).logits, model(ids))


def test_training_begins_with_the_weights_that_were_loaded(spec: JobSpec, pretrained: Path) -> None:
    built = build(spec, member="w0", slot=0, num_slots=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(built.model.state_dict()[name], tensor), name


def test_weights_file_needs_no_folder_or_tokenizer(spec: JobSpec, pretrained: Path) -> None:
    built = build(spec, member="w0", slot=0, num_slots=1)
    assert str(pretrained) not in built.about["options"]
    text = "for x in range(3): print('héllo')"
    again = tokenizer_from_json(built.about["tokenizer"])
    ids = again.encode(text.encode())
    assert ids.tolist() == tokenizer_of(spec).encode(text.encode()).tolist()
    assert again.decode(ids).decode() == text
    assert isinstance(again, PretrainedTokenizer)


def test_ids_are_those_of_the_library(pretrained: Path, spec: JobSpec) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(pretrained)
    ours = tokenizer_of(spec).encode(TEXT[:900].encode()).tolist()
    assert ours == theirs(TEXT[:900], add_special_tokens=False)["input_ids"]


def test_bytes_that_are_no_text_become_replacement_characters(spec: JobSpec) -> None:
    tokenizer = tokenizer_of(spec)
    assert tokenizer.decode(tokenizer.encode(b"a\xffb")) == "a�b".encode()


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_tokenizer_of_a_model_that_brings_none_is_refused(spec: JobSpec, model: str) -> None:
    other = read_spec({"model": {"name": model}, "data": {"tokenizer": "model"}})
    with pytest.raises(ConfigError, match=f"that of a pretrained model.*{model}"):
        build(other, member="w0", slot=0, num_slots=1)


def test_large_vocabulary_evaluates_fewer_sequences(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build(spec, member="w0", slot=0, num_slots=1).held_out
    monkeypatch.setattr("atoll.train.build.MOST_LOGITS", 3 * 16 * 300)
    cut = build(spec, member="w0", slot=0, num_slots=1).held_out
    assert max(len(inputs) for inputs, _ in whole(batch=64)) == 64
    assert max(len(inputs) for inputs, _ in cut(batch=64)) == 3
    one, other = (torch.cat([x for x, _ in batches(batch=64)]) for batches in (whole, cut))
    assert torch.equal(one, other)


def test_random_model_has_the_vocabulary_of_the_data() -> None:
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    spec = read_spec({"model": {"name": "transformers", "config": config, "context": 16}})
    built = build(spec, member="w0", slot=0, num_slots=1)
    assert built.model.lm_head.out_features == 256
    assert '"vocab_size": 256' in built.about["options"]
