"""What every room says of itself, and what only some of them may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

from tests.patience import PATIENCE_S
from tests.test_layers import PACKAGE, ROOT, room_of, sources

WITHOUT_TORCH = [
    "atoll",
    "atoll.wire",
    "atoll.net",
    "atoll.hub",
    "atoll.methods.table",
    "atoll.methods.codecs",
    "atoll.strategies.compatibility",
    "atoll.strategies.traffic_table",
    "atoll.node.agent.agent",
    "atoll.cli",
]
WITHOUT_TORCH += [
    "atoll.node.worker",
    "atoll.node.islands.supervisor",
    "atoll.node.islands.follower",
]  # supervisors are small


def test_every_room_says_what_it_is() -> None:
    """What it contains, what it may import and where to start; all but the package itself."""
    incomplete = []
    for path in sorted(PACKAGE.rglob("__init__.py")):
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        parts = (r"\bimports?\b", r"\bstart\b") if path.parent != PACKAGE else ()
        found = [re.search(part, words, re.IGNORECASE) for part in parts]
        if len(words.split()) < 5 or not all(found):
            incomplete.append(str(path.relative_to(ROOT)))
    assert not incomplete


def test_importing_them_never_loads_torch() -> None:
    """In one process, one after the other: a process each is seconds."""
    modules = list(WITHOUT_TORCH)
    for room in ("wire", "net", "rounds", "swarm", "hub"):
        modules += [
            ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for path in sorted((PACKAGE / room).rglob("*.py"))
            if path.stem[0] != "_"
        ]
    code = "import sys, importlib\n" + "".join(
        f"importlib.import_module({name!r})\n"
        f"if 'torch' in sys.modules: sys.exit('{name} loads torch')\n"
        for name in modules
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_only_config_reads_the_environment() -> None:
    readers = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if room_of(path) != "config" and ("os.environ" in text or "getenv" in text):
            readers.append(str(path.relative_to(ROOT)))
    assert not readers, f"these read the environment, config.py does that: {readers}"


def test_only_one_room_names_kinds_of_accelerators() -> None:
    named = re.compile(r"torch\.(cuda|xpu|mps|accelerator)\b")
    found = [
        str(path.relative_to(ROOT))
        for path in sources()
        if room_of(path) != "devices" and named.search(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"atoll/devices is for every accelerator: {found}"
