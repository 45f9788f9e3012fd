"""Options of the test suite, the order of its files, and randomness that is the same every time."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Generator

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from xdist.remote import Producer

from tests import order, tiers

# Hundreds of processes load the same modules: each is compiled once, whatever the shell says.
# Without its compiled modules a worker takes 2.6 s of processor time to start, with them 1.5.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes says more about what else the machine does than about the code. The
# examples are the same in every run: `--hypothesis-profile=explore` draws others. They are the
# first of those of `--hypothesis-profile=whole`, which `make test-all` takes.
settings.register_profile("atoll", deadline=None, derandomize=True, max_examples=tiers.WHOLE // 3)
settings.register_profile("whole", deadline=None, derandomize=True, max_examples=tiers.WHOLE)
settings.register_profile("explore", deadline=None, max_examples=tiers.WHOLE)
settings.load_profile("atoll")
# Among the examples are numbers and words from all modules that are loaded by then: which these
# are depends on the files that this process has run before.
providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--regenerate` (write golden files instead of comparing with them) and `--measure`."""
    parser.addoption("--regenerate", action="store_true", help="write golden files anew")
    parser.addoption("--measure", action="store_true", help="write what each file took")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in the process that receives every test's report."""
    if config.getoption("--measure") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(order.Measure())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> order.EachOnce | None:
    """Run no test twice, even one that ends its worker."""
    return order.EachOnce(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Load all tests without collecting garbage, and never look at what was loaded again.

    A million objects stay to the end. To go through them took a third of the time to load, and an
    eighth of all that tests compute.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, object, object]:
    """Put long files first: at the end no worker waits for another's last one."""
    tiers.thin(items)
    result = yield  # tests are deselected
    items[:] = order.ordered(items)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin every test with the same random numbers, whatever ran before it."""
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:  # loading it takes seconds, and not every test needs it
            found = sys.modules[name]
            for part in seed.split("."):
                found = getattr(found, part)
            found(0)  # type: ignore[operator]
