"""How the suite runs: stand-ins of long tests, the order of files, tests that end a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import order, tiers

ROOT = Path(__file__).resolve().parents[1]

STAND_IN = "tests/room/test_a.py::test_small"


def written(root: Path, text: str, name: str = "test_a.py") -> Path:
    path = root / "tests" / "room" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def faults(root: Path) -> list[str]:
    """Return the places of all tests below a folder that break the rule."""
    places = [
        place for path in sorted(root.glob("tests/**/*.py")) for place in tiers.named(path, root)
    ]
    quick = {one: tiers.is_quick(one, root) for one in {place.stand_in for place in places}}
    return [f"{one.where}: {one.stand_in!r}" for one in places if not quick[one.stand_in]]


def test_every_long_test_has_a_quick_one_of_its_promise() -> None:
    assert not faults(ROOT), "no such test, or a long one, is named here"


def test_a_stand_in_that_exists_and_is_quick_is_enough(tmp_path: Path) -> None:
    text = f"""
import pytest
def test_small(): ...
@pytest.mark.long("{STAND_IN}")
def test_all(): ...
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.long("{STAND_IN}"))])
def test_each(n): ...
@pytest.mark.parametrize("n", sampled(range(9), lambda n: n < 2, "{STAND_IN}"))
def test_sweep(n): ...
@pytest.mark.long("tests/room/test_a.py::test_each")
def test_more(): ...
"""
    path = written(tmp_path, text)
    assert len(list(tiers.named(path, tmp_path))) == 4
    assert not faults(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.long\ndef test_all(): ...",
        "@pytest.mark.long()\ndef test_all(): ...",
        "@pytest.mark.long('tests/room/test_a.py::test_gone')\ndef test_all(): ...",
        "@pytest.mark.long('tests/room/test_gone.py::test_small')\ndef test_all(): ...",
        "@pytest.mark.long('tests/room/test_a.py::test_all')\ndef test_all(): ...",
        f"pytestmark = [pytest.mark.long('{STAND_IN}')]\ndef test_small(): ...",
        f"pytestmark = pytest.mark.long('{STAND_IN}')\ndef test_small(): ...",
    ],
)
def test_other_names_are_refused(tmp_path: Path, text: str) -> None:
    small = "" if "def test_small" in text else "\ndef test_small(): ..."
    written(tmp_path, f"import pytest\n{text}{small}\n")
    assert len(faults(tmp_path)) == 1


def test_a_sweep_marks_what_is_not_short() -> None:
    found = tiers.sampled([(1, 2), (3, 4)], lambda pair: pair[0] == 1, STAND_IN)
    assert found[0] == (1, 2)
    assert found[1].values == (3, 4)
    (mark,) = found[1].marks
    assert (mark.name, mark.args) == ("long", (STAND_IN,))
    with pytest.raises(AssertionError, match="has short values"):
        tiers.sampled([1], lambda _: False, STAND_IN)


@pytest.mark.every(3)
@pytest.mark.parametrize("number", range(7))
def test_every_third_of_these_is_quick(number: int, request: pytest.FixtureRequest) -> None:
    mark = request.node.get_closest_marker("long")
    assert (mark is None) == (number % 3 == 0)
    if mark is not None:
        assert tiers.is_quick(mark.args[0], ROOT)


# ------------------------------------------------------------------- order, and who runs what


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
