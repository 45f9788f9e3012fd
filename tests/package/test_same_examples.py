"""Properties are tried with the same examples in every run, whatever a process has loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DIGEST = """
import hashlib, sys
sys.path.insert(0, {root!r})
import tests.conftest
{more}
from hypothesis import given, strategies as st
found = hashlib.sha256()

@given(st.tuples(st.integers(), st.text(), st.floats(), st.lists(st.binary())))
def tried(values):
    found.update(repr(values).encode())

tried()
print(found.hexdigest())
"""


def test_what_is_loaded_changes_no_example(tmp_path: Path) -> None:
    found = set()
    for words in ("", "import atoll.methods.periodic"):
        program = tmp_path / "digest.py"
        program.write_text(DIGEST.format(root=str(ROOT), more=words), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(program)], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
