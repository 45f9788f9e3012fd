"""What is exported computes the same in the programs that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.cli.main import main
from atoll.cli.trained.run_files import find_run
from atoll.export.card import model_card
from atoll.train.results.sample import load_model
from tests.export.conftest import trained_run, tune_tables

transformers = pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
peft = pytest.importorskip("peft", reason="pip install 'atoll[tune]'")

IDS = torch.tensor([[7, 30, 41, 9, 12, 60, 61, 5]])


def atoll(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(str(ended.value.code or 0))


@torch.no_grad()
def trained_logits(run: Path) -> Tensor:
    """Return what the model computes as Atoll itself loads it."""
    model, _ = load_model(run / "model.safetensors")
    called: Any = model
    logits: Tensor = called(IDS)
    return logits


@torch.no_grad()
def logits_of(theirs: Any) -> Tensor:
    found: Tensor = theirs.eval()(input_ids=IDS).logits
    return found


def close(one: Tensor, other: Tensor, *, within: float = 1e-4) -> None:
    torch.testing.assert_close(one, other, rtol=within, atol=within)


def test_folder_computes_what_was_trained(tuned: Path, tmp_path: Path) -> None:
    assert atoll("export", tuned, tmp_path / "out") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    close(logits_of(theirs), trained_logits(tuned))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert "<|im_start|>" in tokenizer.chat_template
    text = (tmp_path / "out" / "README.md").read_text()
    assert "tune-tiny" in text
    assert text.startswith("---\nlibrary_name: transformers\n")


def test_a_card_gives_losses_as_the_job_measures_them() -> None:
    facts: dict[str, Any] = {"steps": 9, "nodes": 2, "rounds_committed": 1, "tokens": 80}
    facts |= {"loss_first": 0.5, "loss_final": 0.4}
    for unit, line in (
        ("per answer", "held-out loss: 0.500 before, 0.400 after, per answer\n"),
        ("", "held-out loss: 0.500 before, 0.400 after\n"),
    ):
        summary = facts | {"loss_unit": unit}
        assert line in model_card("run", base="", spec=None, summary=summary, adapter=False)


def test_training_had_an_effect(lora: Path, pretrained: Path) -> None:
    before = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
    assert (logits_of(before) - trained_logits(lora)).abs().max() > 0.05


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # between two libraries
def test_adapters_are_read_by_peft(lora: Path, pretrained: Path, tmp_path: Path) -> None:
    assert atoll("export", lora, tmp_path / "out", "--adapter") == 0
    assert not (tmp_path / "out" / "model.safetensors").exists()
    base = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
    close(
        logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "out")),
        trained_logits(lora),
    )


def test_half_precision_is_written_on_request(lora: Path, tmp_path: Path) -> None:
    assert atoll("export", lora, tmp_path / "out", "--dtype", "bf16") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    close(logits_of(theirs.float()), trained_logits(lora), within=0.1)


@pytest.mark.parametrize(("dtype", "within"), [("fp32", 1e-4), ("fp16", 0.01), ("q8_0", 0.1)])
def test_gguf_computes_what_was_trained(
    lora: Path, tmp_path: Path, dtype: str, within: float
) -> None:
    assert atoll("export", lora, tmp_path / "out.gguf", "--dtype", dtype) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="out.gguf", dtype=torch.float32
    )
    close(logits_of(theirs), trained_logits(lora), within=within)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # between two libraries
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_folder_is_made_of_a_run_on_a_gguf_file(
    lora: Path, chats: Path, tmp_path: Path, method: str
) -> None:
    (tmp_path / "base").mkdir()
    assert atoll("export", lora, tmp_path / "base" / "tiny.gguf") == 0
    tables = tune_tables(tmp_path / "base", chats, method=method)
    tables["model"]["gguf"] = "tiny.gguf"
    run = trained_run(tmp_path / "tune-tiny", tables)
    assert atoll("export", run, tmp_path / "out") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    close(logits_of(theirs), trained_logits(run))
    if method == "lora":
        assert atoll("export", run, tmp_path / "adapter", "--adapter") == 0
        base = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", gguf_file="tiny.gguf", dtype=torch.float32
        )
        close(
            logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "adapter")),
            trained_logits(run),
        )


def test_gguf_has_tokenizer_and_template(lora: Path, tmp_path: Path) -> None:
    assert atoll("export", lora, tmp_path / "out.gguf") == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    ours = find_run(lora).open().tokenizer
    assert ours is not None
    text = "<|im_start|>the user counts 7 apples<|im_end|>"
    assert theirs(text)["input_ids"] == ours(text)["input_ids"]
    assert theirs.chat_template == ours.chat_template
    assert theirs.eos_token == "<|im_end|>"


def test_onnx_computes_what_was_trained_at_any_length(lora: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="pip install 'atoll[onnx]'")
    runtime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    assert atoll("export", lora, tmp_path / "out.onnx") == 0
    session = runtime.InferenceSession(tmp_path / "out.onnx")
    (logits,) = session.run(None, {"input_ids": IDS.numpy()})
    close(torch.from_numpy(logits), trained_logits(lora))
    longer = np.concatenate([IDS.numpy()] * 3, axis=1)
    (logits,) = session.run(None, {"input_ids": longer})
    close(torch.from_numpy(logits[:, :8]), trained_logits(lora))


def test_own_llama_is_one_of_the_library(llama: Path, tmp_path: Path) -> None:
    assert atoll("export", llama, tmp_path / "out") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    close(logits_of(theirs), trained_logits(llama))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "äpfel\n\x00\tzählen"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{full}", "{out}", "--dtype", "q8_0"], "kind of numbers"),
        (["{full}", "{out}.gguf", "--adapter"], "as a folder only"),
        (["{full}", "{out}.onnx", "--dtype", "bf16"], "fp32"),
        (["{full}", "{full}"], "not empty"),
        (["{missing}", "{out}"], "no trained model"),
    ],
)
def test_refusals_say_what_to_do(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    places = {"full": lora, "out": tmp_path / "out", "missing": tmp_path / "missing"}
    assert atoll("export", *(word.format(**places) for word in words)) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_weights_have_no_adapters(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll("export", llama, tmp_path / "out", "--adapter") != 0
    assert "no adapters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("base", "named"),
    [("google/gemma-3-1b", True), ("C:\\models\\gemma", False), ("models/2024/gemma", False),
     ("package:gemma", False), ("a model of one's own", False), ("./gemma", False)],
)  # fmt: skip
def test_a_card_names_a_base_of_a_model_hub_only(base: str, named: bool) -> None:
    card = model_card("run", base=base, spec=None, summary={}, adapter=True)
    assert (f"base_model: {base}\n" in card) == ("base_model_relation" in card) == named
