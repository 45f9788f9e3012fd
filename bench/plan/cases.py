"""The worked cases of docs/guide/planning.md: `python -m bench.plan.cases` writes them anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "planning.md"
FOLDER = Path("examples/planning")
MARK = re.compile(r"(<!-- case: (\w+) -->\n).*?(<!-- end of case -->)", re.DOTALL)
LONGEST_S = 300.0


def case(name: str) -> str:
    """Return what the planner prints for the machines of a case."""
    words = ["plan", str(FOLDER / "job.toml"), "--machines", str(FOLDER / f"{name}.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", *words],
        cwd=ROOT, env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}, check=True,
        capture_output=True, text=True, timeout=LONGEST_S,
    )  # fmt: skip
    lines = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    return f"```text\n$ atoll {' '.join(words)}\n{lines}\n```\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    made = MARK.sub(lambda found: found[1] + case(found[2]) + found[3], text)
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
