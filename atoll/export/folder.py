"""A folder as models are published in: `config.json`, safetensors, tokenizer, chat template."""

from __future__ import annotations

from pathlib import Path

import torch

from atoll.errors import ConfigError
from atoll.export.opened import Opened
from atoll.models.pretrained import library, quiet

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def write_folder(opened: Opened, folder: Path, *, adapter: bool, dtype: str, card: str) -> None:
    """Write the model, or its adapters only, for `from_pretrained` of transformers or peft.

    Args:
        opened: The model.
        folder: Created if missing; must be empty.
        adapter: Write `adapter_model.safetensors` instead of all weights.
        dtype: A key of `DTYPES`.
        card: Text of README.md.

    Raises:
        ConfigError: the folder has files, or the model cannot be exported.
    """
    check_empty(folder)
    model = opened.adapted() if adapter else opened.whole()
    model = model.to(DTYPES[dtype])
    folder.mkdir(parents=True, exist_ok=True)
    if adapter:
        for config in model.peft_config.values():
            config.base_model_name_or_path = opened.base
    else:
        model.config.dtype = DTYPES[dtype]
    # peft would look for the base's configuration, to see whether tokens were added: none ever are.
    settings = {"save_embedding_layers": False} if adapter else {}
    with quiet(library()):
        model.save_pretrained(folder, **settings)
    if opened.tokenizer is not None:
        opened.tokenizer.save_pretrained(folder)
    # After peft, which writes one.
    (folder / "README.md").write_text(card, encoding="utf-8", newline="\n")


def check_empty(folder: Path) -> None:
    """Raise ConfigError if a folder has files."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            "the folder is not empty", given=str(folder), expected="a new or an empty folder",
            remedy="name another one, or delete it first",
        )  # fmt: skip
