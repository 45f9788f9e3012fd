"""Runs the tests of this folder on a pretended accelerator.

The registration holds for a whole process and cannot be undone, so every file runs in a process
of its own: one for all of its tests. The tests are ordinary ones. In the process of the suite
each of them only reports what it did there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.accelerator import child

IN_CHILD = child.VARIABLE in os.environ

if IN_CHILD:
    import torch

    from tests.accelerator import pretended, registration

    registration.register()


@pytest.fixture(autouse=IN_CHILD)
def nothing_recorded() -> Iterator[None]:
    """Begin and end every test with an empty record and a complete accelerator."""
    pretended.RECORD.clear()
    registration.MODULE.manual_seed_all(0)
    yield
    pretended.RECORD.clear()


@pytest.fixture
def device() -> object:
    """Return the accelerator; None in the process of the suite, which only reports."""
    return torch.device("pretended", 0) if IN_CHILD else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Report what the test did in the process of its file."""
    if IN_CHILD or Path(__file__).parent not in pyfuncitem.path.parents:
        return None
    results = pyfuncitem.session.config.stash.setdefault(_RESULTS, {})
    path = pyfuncitem.path
    if path not in results:
        same = [i.nodeid for i in pyfuncitem.session.items if i.path == path]
        results[path] = child.run(path, same)
    outcome, text = results[path].get(pyfuncitem.name, ("lost", results[path]["*"][1]))
    if outcome == "skipped":
        pytest.skip(text)
    if outcome != "passed":
        pytest.fail(text, pytrace=False)
    return True


_RESULTS = pytest.StashKey[dict[Path, child.Results]]()
