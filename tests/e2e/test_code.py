"""A folder of code travels to a node, gets its packages there, and what it made comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Atoll, lines_until, ticket_of, until
from tests.node.packages.packages import wheel

pytestmark = pytest.mark.e2e

MAIN = """
import json, pathlib, sys
import helper, tiny_pack
pathlib.Path("out").mkdir()
pathlib.Path("out/result.json").write_text(json.dumps([helper.DOUBLE(21), tiny_pack.TEXT]))
pathlib.Path("out/scratch.tmp").write_text("not wanted")
print("python", sys.prefix != sys.base_prefix, "ignored", pathlib.Path("data.bin").exists())
"""

JOB = """
[job]
name = "{name}"
{what}
code = "project"
requirements = "requirements.txt"
artifacts = ["out/", "!*.tmp"]
"""


def project(
    atoll: Atoll, *, requirements: str = "--no-index\n./tiny_pack-1.0-py3-none-any.whl\n"
) -> None:
    folder = atoll.folder / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "main.py").write_text(MAIN)
    (folder / "helper.py").write_text("DOUBLE = lambda x: 2 * x\n")
    (folder / "requirements.txt").write_text(requirements)
    (folder / "tiny_pack-1.0-py3-none-any.whl").write_bytes(wheel("tiny_pack"))
    (folder / "data.bin").write_bytes(bytes(1000))
    (folder / ".gitignore").write_text("*.bin\n")


def write(atoll: Atoll, name: str, what: str) -> str:
    path = atoll.folder / f"{name}.toml"
    path.write_text(JOB.format(name=name, what=what))
    return str(path)


def collected(atoll: Atoll, name: str) -> Path:
    (folder,) = [path for path in atoll.runs.iterdir() if path.name.startswith(name)]
    return folder


def test_code_packages_and_artifacts_travel(
    atoll: Atoll,
) -> None:
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="lap1")
    project(atoll)
    done = atoll.run("run", write(atoll, "program", 'command = ["python", "main.py"]'))
    assert done.code == 0, done.both
    with hub.client() as client:
        (view,) = client.jobs()
        job = view["job"]
        lines = lines_until(client, job, "python True ignored False")
        assert any("Successfully installed tiny" in line for line in lines)
        names = {file.name for file in client.files(job)}
        assert {name for name in names if name.startswith("artifacts/")} == {
            "artifacts/w0/out/result.json"
        }
        assert client.read_file(job, "artifacts/w0/out/result.json") == b'[42, "here"]'
        done = atoll.run("run", write(atoll, "script", 'script = "main.py"'))
        assert done.code == 0, done.both
        script = next(view["job"] for view in client.jobs() if view["job"] != job)
        lines = lines_until(client, script, "python True ignored False")
        assert any("in the cache" in line for line in lines)
        assert not any("Successfully installed" in line for line in lines)  # built once
        assert client.read_file(script, "artifacts/w0/out/result.json") == b'[42, "here"]'
    kept = (atoll.folder / "lap1" / "venvs").glob("*/ready.json")
    assert len(list(kept)) == 1


def test_packages_that_cannot_be_had_end_the_job_with_pips_words(atoll: Atoll) -> None:
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="lap1")
    project(atoll, requirements="--no-index\nno-such-package-of-atoll\n")
    done = atoll.run("run", write(atoll, "broken", 'command = ["python", "main.py"]'))
    assert done.code == 2, done.both  # the job itself is wrong
    assert "the environment of the job cannot be built" in done.both
    assert "no-such-package-of-atoll" in done.both
    with hub.client() as client:
        (view,) = client.jobs()
        assert view["state"] == "failed"
        assert [member["attempt"] for member in view["members"]] == [1]


def test_job_that_is_stopped_while_it_is_prepared_leaves_nothing(atoll: Atoll) -> None:
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="lap1")
    project(atoll, requirements="--no-index\n./slow\n")
    slow = atoll.folder / "project" / "slow"
    slow.mkdir()
    text = '[build-system]\nrequires = []\nbuild-backend = "slow"\nbackend-path = ["."]\n'
    (slow / "pyproject.toml").write_text(text + '[project]\nname = "slow"\nversion = "1"\n')
    (slow / "slow.py").write_text("import time\nprint('building')\ntime.sleep(600)\n")
    running = atoll.start("run", write(atoll, "slow", 'command = ["python", "main.py"]'))

    until(lambda: atoll.running("pip"))
    with hub.client() as client:
        (view,) = client.jobs()
        client.stop(view["job"], grace_s=1.0)
        until(lambda: client.job(view["job"])["state"] == "stopped")
    until(lambda: not atoll.running("pip"))
    running.wait()
    venvs = atoll.folder / "lap1" / "venvs"
    until(lambda: [path for path in venvs.iterdir() if path.is_dir()] == [])
