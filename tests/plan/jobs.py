"""Small jobs for tests of plans."""

from __future__ import annotations

from pathlib import Path

from atoll.config import JobSpec, parse_spec

IMAGES = frozenset({"resnet", "vit"})
SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 8}

CONFIGURED = """context = 8
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
tie_word_embeddings = true
"""


def job(
    folder: Path, *, model: str = "gpt", batch: int = 8, train: str = "", strategy: str = "",
    island: str = "", more: str = "", sizes: str | None = None,
) -> JobSpec:  # fmt: skip
    """Return a job whose text is in a folder; the model is as small as it gets."""
    corpus = 'corpus = "segments"' if model in IMAGES else f'corpus = "files:{folder}/*.txt"'
    if model == "transformers":
        sizes = CONFIGURED
    if sizes is None:
        sizes = "" if model in IMAGES else "\n".join(f"{k} = {v}" for k, v in SMALL.items())
    (folder / "a.txt").write_text("All work and no play. " * 200, encoding="utf-8")
    return parse_spec(
        f'[model]\nname = "{model}"\n{sizes}\n[data]\n{corpus}\n[train]\nbatch = {batch}\n{train}\n'
        f"[strategy]\n{strategy}\n[island]\n{island}\n{more}\n"
    )
