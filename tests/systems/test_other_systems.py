"""The product on systems that lack what only Linux, or only POSIX, has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Atoll
from tests.e2e.conftest import atoll as atoll
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems are pretended on Linux"),
]

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]

IMPORT_ALL = """
import gc, importlib, pkgutil, traceback
gc.disable()
import atoll
from atoll.errors import ConfigError
wrong = []
for found in pkgutil.walk_packages(atoll.__path__, "atoll."):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ConfigError as error:
        if "is not installed" not in str(error):
            raise
    except Exception:
        wrong.append(found.name + "\\n" + traceback.format_exc(limit=-2))
from atoll.node.processes import process_tree
assert type(process_tree.sys).__name__ == "Pretended"
gc.freeze()
raise SystemExit("\\n".join(wrong) or 0)
"""


@pytest.fixture(params=["win32", "darwin"])
def system(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let child processes pretend another system; return the file of their commands."""
    monkeypatch.setenv("PRETENDED_SYSTEM", request.param)
    monkeypatch.setenv("PRETENDED_LOG", str(tmp_path / "processes"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(ROOT)]))
    return tmp_path / "processes"


@pytest.mark.every(2)
def test_every_module_can_be_imported(system: Path) -> None:
    words = [sys.executable, "-c", IMPORT_ALL]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert system.exists()


@pytest.mark.long("tests/systems/test_other_systems.py::test_every_module_can_be_imported")
def test_a_job_of_two_members_runs(system: Path, atoll: Atoll) -> None:
    job = atoll.job(steps=20, every=10)
    if os.environ["PRETENDED_SYSTEM"] == "win32":  # Gloo would look for the loopback of a Mac
        text = job.read_text(encoding="utf-8").replace("[strategy]", '[strategy]\ninner = "ddp"')
        job.write_text(text + "\n[island]\nranks = 2\n", encoding="utf-8")
    done = atoll.run("run", str(job), "--local", "2")
    assert done.code == 0, done.both
    summary = json.loads((atoll.job_folder() / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 20
    assert summary["replicas_identical"]
    ran = system.read_text(encoding="utf-8")
    for part in ("atoll.hub", "atoll.node ", "atoll.node.worker", "atoll.reducer"):
        assert part in ran, f"{part} has run on the real system"
    atoll.assert_ended()
