"""Runs the tests of this folder on the accelerator that torch finds, else on a pretended one.

The registration holds for a whole process and cannot be undone, so every file runs in a process
of its own: one for all of its tests. The tests are ordinary ones. In the process of the suite
each of them only reports what it did there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.accelerator import child

IN_CHILD = child.VARIABLE in os.environ
REAL = child.is_real()

if IN_CHILD:
    import torch

    from tests.accelerator import noted, pretended, registration

    if not REAL:
        registration.register()
    HERE = torch.accelerator.current_accelerator() or torch.device(pretended.NAME)


@pytest.fixture(autouse=IN_CHILD)
def nothing_recorded() -> Iterator[None]:
    """Begin and end every test with an empty record and a complete accelerator."""
    pretended.RECORD.clear()
    torch.get_device_module(HERE).manual_seed_all(0)
    with noted.recorded(pretended.RECORD) if REAL else nullcontext():
        yield
    pretended.RECORD.clear()


@pytest.fixture
def device() -> object:
    """Return the accelerator; None in the process of the suite, which only reports."""
    return torch.device(HERE.type, 0) if IN_CHILD else None


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
