"""A test's name is a promise that fits in one line of a report."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
MOST = 60


def test_no_name_is_longer_than_60_characters() -> None:
    long = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name in re.findall(r"(?m)^\s*(?:async )?def (test_\w+)", path.read_text("utf-8"))
        if len(name) > MOST
    ]
    assert not long, "\n".join(long)
