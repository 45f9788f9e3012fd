"""The examples that train something else than the small GPT do what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Atoll

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = ("train.steps=6", "strategy.every=3", "train.warmup=2", "job.threads=1")


def run(atoll: Atoll, name: str, *settings: str) -> dict[str, Any]:
    """Run a shortened example on two nodes and return its summary."""
    words = [word for setting in (*SHORT, *settings) for word in ("--set", setting)]
    done = atoll.run("run", str(EXAMPLES / name), "--local", "2", *words)
    assert done.code == 0, done.both
    atoll.assert_ended()
    summary: dict[str, Any] = json.loads((atoll.job_folder() / "summary.json").read_text())
    assert summary["replicas_identical"]
    assert summary["steps"] == 6
    return summary


@pytest.mark.long("tests/train/test_classifiers.py::test_two_members_train_one_classifier")
def test_classifier_is_trained_on_drawn_digits(atoll: Atoll) -> None:
    summary = run(
        atoll, "fashion_mnist.toml", "data.corpus=segments", "model.width=8", "train.batch=8",
        "train.eval_tokens=64", "train.pace=equal",
    )  # fmt: skip
    assert 0 < summary["accuracy"] <= 1
    assert summary["tokens"] == 2 * 6 * 8
    assert summary["sample"] == ""
    refused = atoll.run("generate", str(atoll.job_folder()))
    assert refused.code == 2
    assert "this model writes no text" in refused.both


@pytest.mark.long(
    "tests/e2e/test_mesh_products.py::test_pipeline_and_tensor_train_what_one_process_does"
)
def test_language_model_is_trained_on_an_island_with_a_mesh(atoll: Atoll) -> None:
    small = ("model.layers=1", "model.width=32", "model.context=32", "train.batch=4")
    # One island of four processes: two of them would only start four more of the same.
    summary = run(atoll, "gpt_fsdp.toml", *small, "train.eval_tokens=256", "job.nodes=1")
    assert summary["loss_final"] < summary["loss_first"]


@pytest.mark.long("tests/models/test_causal_lm.py::test_model_is_loaded_from_a_folder")
def test_pretrained_model_is_fine_tuned_on_two_islands(atoll: Atoll) -> None:
    folder = tiny_pretrained(atoll.folder / "pretrained")
    text = atoll.folder / "text.txt"
    text.write_text("".join(f"line {n} of {n * n}\n" for n in range(3000)))
    summary = run(
        atoll, "fine_tune.toml", f"model.source={folder}", "model.gguf=", "model.context=16",
        f"data.corpus=files:{text}", "train.batch=4", "train.eval_tokens=256", "train.lr=0.01",
    )  # fmt: skip
    assert summary["loss_final"] < summary["loss_first"]
    assert summary["strategy"]["inner"] == "fsdp"
    written = atoll.run("generate", str(atoll.job_folder()), "-p", "line", "-n", "5")
    assert written.code == 0, written.both
    assert written.out.startswith("line")


def tiny_pretrained(folder: Path) -> Path:
    """Write a folder as models are published in: a random llama and a byte-pair tokenizer."""
    transformers = pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE(vocab=_alphabet(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _alphabet() -> dict[str, int]:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {letter: number for number, letter in enumerate(letters)}
