"""Dockerfiles as lists of instructions, and what of the source they may see."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str


def read(name: str) -> list[Instruction]:
    """Return the instructions of `deploy/NAME`, comments and line ends taken out."""
    lines = [line for line in (DEPLOY / name).read_text().splitlines()
             if not line.lstrip().startswith("#")]  # fmt: skip
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in text.splitlines() if line.strip()]


def context(target: Path) -> None:
    """Copy what `.dockerignore` lets through, as the builder sees it."""
    let_through = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines()
                   if line.startswith("!")]  # fmt: skip
    target.mkdir()
    for name in let_through:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
