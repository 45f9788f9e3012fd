"""Every long test names a test of `make test` that keeps the same promise in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiers

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
