"""A pretrained model as it is published, small enough for a test: a llama and its tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from atoll.data.tuning.rendering import CHATML

DOCSTRING_CHATS = Path(__file__).resolve().parents[2] / "examples" / "docstring_chats.py"


def save_tiny(folder: Path, *, template: str = CHATML, context: int = 128) -> Path:
    """Write the model to a folder and return it; its weights are always the same."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(["the user and the assistant count apples"] * 9, trainer=trainer)
    marks = ["<|im_start|>", "<|im_end|>"]
    inner.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    kind: Any = transformers.PreTrainedTokenizerFast
    made = kind(tokenizer_object=inner, eos_token="<|im_end|>")
    made.chat_template = template or None
    made.save_pretrained(folder)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=len(made), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=made.eos_token_id,
        pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder of :func:`save_tiny`."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def count_chat(number: int) -> dict[str, Any]:
    """Return a record: a question and an answer about a number."""
    return {
        "messages": [
            {"role": "user", "content": f"count {number} apples"},
            {"role": "assistant", "content": f"the answer is {number % 7}"},
        ]
    }


def count_chats(file: Path) -> Path:
    """Write sixty records of :func:`count_chat` to a file and return it."""
    lines = [json.dumps(count_chat(number)) + "\n" for number in range(60)]
    file.write_text("".join(lines), encoding="utf-8")
    return file


def docstring_chats(file: Path) -> Path:
    """Write some of the chats that the example makes of the standard library; return the file."""
    subprocess.run([sys.executable, str(DOCSTRING_CHATS), str(file)], check=True)
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) > 1000
    file.write_text("".join(lines[::30]), encoding="utf-8")
    return file
