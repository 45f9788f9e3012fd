"""What the workflows call exists, and is the same on every system."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOWS = [path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")]
COMMANDS = [
    row for flow in FLOWS for row in re.findall(r"^ +(?:- )?run: (.+)$", flow, re.MULTILINE)
]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_targets_and_modules_that_workflows_call_exist() -> None:
    targets = [word for row in COMMANDS for word in re.findall(r"\bmake ([\w-]+)", row)]
    assert targets
    made = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    assert set(targets) <= made
    modules = [word for row in COMMANDS for word in re.findall(r"python -m ([\w.]+)", row)]
    assert modules
    assert [one for one in modules if importlib.util.find_spec(one) is None] in ([], ["pip"])


def test_windows_runs_the_commands_that_make_runs() -> None:
    (common,) = re.findall(r"^PYTEST = .*-m (pytest .*)$", MAKEFILE, re.MULTILINE)
    (chosen,) = re.findall(
        r"^test:.*\n\t\$\(PYTEST\) (.*) \$\(PYTEST_OPTIONS\)$", MAKEFILE, re.MULTILINE
    )
    tests = f"{common} {chosen}"
    (workers,) = re.findall(r"^WORKERS \?= (\d+)$", MAKEFILE, re.MULTILINE)
    assert f"python -m {tests.replace('$(WORKERS)', workers)}" in COMMANDS
    (install,) = re.findall(
        r"^PIP = .* (-c \S+ -e \S+)$", MAKEFILE.replace("\\\n", ""), re.MULTILINE
    )
    assert f"python -m pip install {install.replace('$*', 'dev')}" in COMMANDS


def test_clones_have_the_same_line_ends_everywhere() -> None:
    assert (
        "* text=auto eol=lf" in (ROOT / ".gitattributes").read_text(encoding="utf-8").splitlines()
    )
