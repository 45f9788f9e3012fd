"""The suite's order, and what becomes of a test that ends its worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import order

ROOT = Path(__file__).resolve().parents[1]


def test_long_files_come_first_each_by_what_is_before_it() -> None:
    found = order.places({"a": 1.0, "b": 6.0, "c": 3.0, "other": 99.0}, ("a", "b", "c"))
    assert found == {"b": (0.0, "b"), "c": (0.6, "c"), "a": (0.9, "a")}


def test_a_test_that_ends_its_worker_is_run_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "test_own.py").write_text(
        f"import os\nfrom pathlib import Path\n"
        f"def test_before(): ...\n"
        f"def test_ends():\n"
        f"    with Path({str(log)!r}).open('a') as file: file.write('begun ')\n"
        f"    os._exit(1)\n"
        f"def test_after(): ...\n"
    )
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-q", "-p",
         "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert log.read_text() == "begun ", ended.stdout
    assert "crashed while running 'test_own.py::test_ends'" in ended.stdout
    assert "1 failed, 2 passed" in ended.stdout


def test_quick_files_fit_and_are_of_every_quick_room() -> None:
    found, known = order.quick(), order.seconds()
    assert len(found) == len(set(found))
    assert sum(known.get(name, order.Durations()).usual_s for name in found) <= order.QUICK_S
    rooms = {name.split("/")[1] for name in found}
    assert {"codec", "group", "strategies"} <= rooms
    assert not rooms & order.SLOW_ROOMS
