"""`atoll chat` and `atoll evaluate`, as commands."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from atoll.cli.main import main
from atoll.cli.trained.run_files import find_run
from atoll.export.chat import Manner, open_chat

CPU = torch.device("cpu")


def atoll(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(str(ended.value.code or 0))


def test_one_message_gets_one_answer(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("chat", lora, "-m", "count 3 apples", "-n", "12", "--seed", "5", "--device", "cpu")
    assert atoll(*words) == 0
    first = capsys.readouterr().out
    assert atoll(*words) == 0
    assert capsys.readouterr().out == first
    talk = open_chat(find_run(lora).open(), manner=Manner(tokens=12, seed=5), device=CPU)
    assert first == talk.answer("count 3 apples") + "\n"


def test_a_pipe_is_one_message(
    lora: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("count 3 apples\n"))
    assert atoll("chat", lora, "-n", "12", "--seed", "5", "--device", "cpu") == 0
    piped = capsys.readouterr().out
    assert atoll("chat", lora, "-m", "count 3 apples", "-n", "12", "--seed", "5") == 0
    assert capsys.readouterr().out == piped
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert atoll("chat", lora) != 0
    assert "no message" in capsys.readouterr().err


def test_a_conversation_remembers_and_forgets(lora: Path) -> None:
    manner = Manner(tokens=4, temperature=0, system="be short")
    talk = open_chat(find_run(lora).open(), manner=manner, device=CPU)
    written: list[str] = []
    answer = talk.answer("count 1 apples", write=written.append)
    assert "".join(written) == answer
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    talk.answer("count 2 apples")
    assert len(talk.messages) == 5
    talk.forget()
    assert talk.messages == [{"role": "system", "content": "be short"}]
    assert talk.answer("count 1 apples") == answer


def test_a_model_without_template_goes_on_with_the_text(llama: Path) -> None:
    talk = open_chat(find_run(llama).open(), manner=Manner(tokens=5), device=CPU)
    assert len(talk.answer("the users").encode()) >= 1


def test_too_long_conversation_is_refused(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll("chat", lora, "-m", "apples " * 200) != 0
    assert "too long" in capsys.readouterr().err


def test_perplexity_is_that_of_the_library(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"the user counts {n} apples and the assistant counts {n + 1}" for n in range(5)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert atoll("evaluate", lora, file, "--json", "--device", "cpu") == 0
    found = json.loads(capsys.readouterr().out)
    opened = find_run(lora).open()
    assert opened.tokenizer is not None
    model, total, tokens = opened.whole(), 0.0, 0
    for text in texts:
        ids = torch.tensor([*opened.tokenizer(text)["input_ids"], opened.tokenizer.eos_token_id])
        with torch.no_grad():
            logits = model(input_ids=ids[None, :-1]).logits[0]
        total += float(functional.cross_entropy(logits, ids[1:], reduction="sum"))
        tokens += len(ids) - 1
    assert (found["examples"], found["tokens"]) == (5, tokens)
    assert found["loss"] == pytest.approx(total / tokens, rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-3)
    assert atoll("evaluate", lora, file) == 0
    assert "perplexity" in capsys.readouterr().out
