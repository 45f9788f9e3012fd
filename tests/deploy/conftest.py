"""What the hub is installed from: packages fetched once, so that every installation is offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.dockerfiles import context
from tests.patience import PATIENCE_S

INSTALL_S = 5 * PATIENCE_S
"""To install everything is a minute's work, and a bound is only to guard against hanging."""


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with everything that `pip install .` needs; skip where no index answers."""
    folder = tmp_path_factory.mktemp("packages")
    context(folder / "source")
    target = folder / "wheels"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--wheel-dir", str(target),
         str(folder / "source"), "hatchling"],
        capture_output=True, text=True, timeout=INSTALL_S, check=False, env={**os.environ},
    )  # fmt: skip
    said = done.stdout + done.stderr
    if done.returncode and re.search(r"Retrying \(Retry|No matching distribution", said):
        pytest.skip("no package index can be reached: " + said.strip()[-200:])
    assert done.returncode == 0, said
    for own in target.glob("atoll-*.whl"):  # it is what the steps are to make
        own.unlink()
    return target
