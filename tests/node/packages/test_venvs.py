"""Environments of jobs: built once per list of packages, for real, and bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.errors import ConfigError, JobError
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.node.agent.workspace import Workspace
from atoll.node.packages import venvs
from atoll.node.processes.file_locks import FileLock
from tests.node.agent.preparing_machine import Machine, run, with_package
from tests.node.packages.packages import wheel
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, str]]:
    """Yield a machine with an environment, and the code that it was built for: it takes seconds."""
    folder = tmp_path_factory.mktemp("built")
    options = HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False)
    with HubServer(options) as hub:
        machine = Machine(hub, folder)
        mine = {"psutil-0.1-py3-none-any_DOT_whl": wheel("psutil", "0.1", text="mine")}
        text = "--no-index\n./tiny_one-1.0-py3-none-any.whl\n./psutil-0.1-py3-none-any.whl\n"
        code = machine.send(**with_package("tiny_one", **mine, requirements_DOT_txt=text))

        async def build() -> None:
            machine.preparer.release(await machine.prepare(code, requirements="requirements.txt"))

        asyncio.run(build())
        yield machine, code


def test_an_environment_has_the_jobs_packages_and_the_agents(built: tuple[Machine, str]) -> None:
    machine, code = built

    async def test() -> None:
        prepared = await machine.prepare(code, requirements="requirements.txt")
        assert prepared.python != Path(sys.executable)
        printed = run(
            prepared.python,
            "import tiny_one, atoll, msgspec, sys; print(tiny_one.TEXT, sys.prefix);"
            " import importlib.util; print(importlib.util.find_spec('torch') is not None)",
        ).split()
        assert printed == ["here", str(prepared.python.parent.parent), "True"]
        (said,) = [line for line in machine.lines if "Successfully installed" in line]
        assert "tiny_one-1.0" in said.replace("tiny-one", "tiny_one")
        machine.preparer.release(prepared)

    asyncio.run(test())
    with pytest.raises(subprocess.CalledProcessError):
        run(Path(sys.executable), "import tiny_one")  # the agent's own Python is as it was


def test_a_package_comes_before_the_agents_own_of_that_name(built: tuple[Machine, str]) -> None:
    machine, code = built

    async def test() -> None:
        prepared = await machine.prepare(code, requirements="requirements.txt")
        assert run(prepared.python, "import psutil; print(psutil.TEXT)") == "mine"
        machine.preparer.release(prepared)

    asyncio.run(test())
    assert run(Path(sys.executable), "import psutil; print(psutil.version_info[0] > 1)") == "True"


def test_a_package_that_is_built_from_a_folder_of_the_code(machine: Machine) -> None:
    backend = """
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    info = "built-2.0.dist-info"
    with zipfile.ZipFile(f"{folder}/built-2.0-py3-none-any.whl", "w") as archive:
        archive.write("built.py")
        metadata = ["Metadata-Version: 2.1", "Name: built", "Version: 2.0", ""]
        archive.writestr(f"{info}/METADATA", "\\n".join(metadata))
        tags = ["Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any", ""]
        archive.writestr(f"{info}/WHEEL", "\\n".join(tags))
        archive.writestr(f"{info}/RECORD", "")
    return "built-2.0-py3-none-any.whl"
"""
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    code = machine.send(
        package__pyproject_DOT_toml=project + '[project]\nname = "built"\nversion = "2.0"\n',
        package__backend_DOT_py=backend,
        package__built_DOT_py="TEXT = 'from a folder'\n",
        needs__all_DOT_txt="--no-index\n./package\n",
    )

    async def test() -> None:
        prepared = await machine.prepare(code, requirements="needs/all.txt")
        assert run(prepared.python, "import built; print(built.TEXT)") == "from a folder"
        assert sorted(path.name for path in (prepared.folder / "package").iterdir()) == [
            "backend.py", "built.py", "pyproject.toml"
        ]  # fmt: skip

    asyncio.run(test())


def test_two_processes_with_the_same_requirements_build_it_once(machine: Machine) -> None:
    other = Machine(machine.hub, machine.folder)  # another agent with the same home
    code = machine.send(**with_package("tiny_two"))

    async def test() -> None:
        one, two = await asyncio.gather(
            machine.prepare(code, requirements="requirements.txt", member="w0"),
            other.prepare(code, requirements="requirements.txt", member="w1"),
        )
        assert one.python == two.python
        built = [line for line in machine.lines + other.lines if "Successfully" in line]
        assert len(built) == 1
        waited = [line for line in machine.lines + other.lines if "waiting" in line]
        assert len(waited) == 1

    asyncio.run(test())


HOLDER = """
import asyncio, sys
from pathlib import Path
from atoll.node.processes.file_locks import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.try_lock(shared=False)
print("locked", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(os.name != "posix", reason="shared locks are those of POSIX")
def test_dead_agents_build_lock_is_freed(built: tuple[Machine, str]) -> None:
    machine, code = built

    async def test() -> None:
        prepared = await machine.prepare(code, requirements="requirements.txt")
        machine.preparer.release(prepared)
        lock = prepared.python.parent.parent.with_suffix(".lock")
        command = [sys.executable, "-c", HOLDER, str(lock)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            task = asyncio.create_task(machine.prepare(code, requirements="requirements.txt"))
            await until(lambda: any("waiting" in line for line in machine.lines))
            assert not task.done()
            holder.kill()
            again = await asyncio.wait_for(task, PATIENCE_S)
            assert again.python == prepared.python
            machine.preparer.release(again)

    asyncio.run(test())


@pytest.mark.skipif(os.name != "posix", reason="shared locks are those of POSIX")
def test_older_process_ends_without_unlocking_the_newer(built: tuple[Machine, str]) -> None:
    machine, code = built

    async def test() -> None:
        older = await machine.prepare(code, requirements="requirements.txt")
        newer = await machine.prepare(code, requirements="requirements.txt")
        other = FileLock(newer.python.parent.parent.with_suffix(".lock"))
        machine.preparer.release(older)
        assert not other.try_lock(shared=False)
        machine.preparer.release(newer)
        assert other.try_lock(shared=False)
        other.release()

    asyncio.run(test())


def test_failed_pip_shows_last_lines_and_leaves_nothing(
    machine: Machine,
) -> None:
    code = machine.send(r_DOT_txt="--no-index\n--find-links .\nno-such-package-of-atoll==9.9\n")
    with pytest.raises(ConfigError, match=r"no-such-package-of-atoll==9\.9") as caught:
        asyncio.run(machine.prepare(code, requirements="r.txt"))
    assert "pip install" in caught.value.message()
    assert machine.kept("venvs") == []
    assert [path for path in (machine.home / "venvs").iterdir() if path.is_dir()] == []


def test_a_network_that_fails_is_not_the_fault_of_the_job(machine: Machine) -> None:
    index = "--index-url http://127.0.0.1:9/simple"
    code = machine.send(r_DOT_txt=f"{index}\nno-such-package-of-atoll\n")
    with pytest.raises(JobError, match="the network failed"):
        asyncio.run(machine.prepare(code, requirements="r.txt"))


SLOW = """
import time, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("building", child.pid, flush=True)
open({path!r}, "w").write(str(child.pid))
time.sleep(600)
"""


def slow_code(machine: Machine, note: Path) -> str:
    """Return code whose package takes ten minutes to build."""
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    return machine.send(
        package__pyproject_DOT_toml=project + '[project]\nname = "slow"\nversion = "1"\n',
        package__backend_DOT_py=SLOW.format(path=str(note)),
        r_DOT_txt="--no-index\n./package\n",
    )


async def until(condition: Any, *, timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_cancelled_build_leaves_no_process_or_file(machine: Machine, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = slow_code(machine, note)

    async def test() -> None:
        task = asyncio.create_task(machine.prepare(code, requirements="r.txt"))
        await until(lambda: note.is_file() and note.read_text())
        assert len(machine.preparer.children) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: gone(int(note.read_text())))
        assert machine.preparer.children == set()

    asyncio.run(test())
    assert [path for path in (machine.home / "venvs").iterdir() if path.is_dir()] == []


@pytest.mark.long(
    "tests/node/packages/test_venvs.py::test_cancelled_build_leaves_no_process_or_file"
)
def test_a_build_that_takes_too_long_is_ended(hub: HubServer, tmp_path: Path) -> None:
    note, build_s = tmp_path / "pid", 6.0
    while not note.is_file():  # a busy machine begins to build later
        machine = Machine(hub, tmp_path, build_s=build_s)
        with pytest.raises(JobError, match="not ready in time"):
            asyncio.run(machine.prepare(slow_code(machine, note), requirements="r.txt"))
        build_s *= 3
    assert gone(int(note.read_text()))
    assert [path for path in (machine.home / "venvs").iterdir() if path.is_dir()] == []


def test_partial_build_of_a_killed_agent_is_redone(built: tuple[Machine, str]) -> None:
    machine, code = built

    async def test() -> None:
        prepared = await machine.prepare(code, requirements="requirements.txt")
        machine.preparer.release(prepared)
        folder = prepared.python.parent.parent
        (folder / "ready.json").unlink()
        (folder / "bin").rename(folder / "half")
        again = await machine.prepare(code, requirements="requirements.txt")
        assert run(again.python, "import tiny_one; print(tiny_one.TEXT)") == "here"
        assert not (folder / "half").exists()
        machine.preparer.release(again)

    asyncio.run(test())


def test_only_unused_environments_are_evicted(hub: HubServer, tmp_path: Path) -> None:
    machine = Machine(hub, tmp_path, max_venv_bytes=1)

    async def prepare(name: str) -> Workspace:
        code = machine.send(**with_package(name))
        return await machine.prepare(code, requirements="requirements.txt", member=name)

    async def test() -> None:
        first = await prepare("tiny_five")
        second = await prepare("tiny_six")
        assert first.python.exists(), "it is used"
        machine.preparer.release(first)
        await prepare("tiny_seven")
        assert not first.python.exists()
        assert second.python.exists()

    asyncio.run(test())


@pytest.mark.parametrize("name", ["missing.txt", "../outside.txt", "folder"])
def test_a_file_of_requirements_that_is_not_in_the_code(machine: Machine, name: str) -> None:
    code = machine.send(folder__a="x")
    (machine.folder / "work" / "w0").mkdir(parents=True)
    (machine.folder / "work" / "w0" / "outside.txt").write_text("")
    with pytest.raises(ConfigError, match="no such file of requirements"):
        asyncio.run(machine.prepare(code, requirements=name))


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("numpy\n# ./comment\nhttpx[http2]~=0.28  # why\n", True),
        ("torch>=2.6 ; python_version > '3'\n", True),
        ("a @ https://example.org/a-1.0.tar.gz\n", True),
        ("--extra-index-url https://example.org/whl/cpu\ntorch\n", True),
        ("--no-index\n--find-links=https://example.org/wheels\na==1 --hash=sha256:ab\n", True),
        ("--no-index\n--find-links wheels\na\n", False),
        ("./package\n", False),
        ("-e .\n", False),
        ("-r more.txt\n", False),
        ("--constraint limits.txt\nnumpy\n", False),
        ("a @ file:///somewhere/a.whl\n", False),
        ("package/dist/a-1.0-py3-none-any.whl\n", False),
        ("nu\\\nmpy\n", True),
    ],
)
def test_requirements_within_the_code_are_recognised(text: str, alone: bool) -> None:
    assert recipe(text, "one").alone is alone


@pytest.mark.parametrize(("text", "alone"), [("numpy\n", True), ("./package\n", False)])
def test_environments_are_shared_unless_the_code_is_in_them(text: str, alone: bool) -> None:
    assert (recipe(text, "one").key() == recipe(text, "two").key()) is alone


def recipe(text: str, code: str) -> venvs.VenvRecipe:
    return venvs.VenvRecipe(requirements=text, name="r.txt", code=code, folder=Path())


@pytest.mark.long(
    "tests/node/packages/test_venvs.py::test_an_environment_has_the_jobs_packages_and_the_agents"
)
def test_a_package_of_the_index_is_installed(machine: Machine) -> None:
    probe = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "-q",
         "-d", str(machine.folder / "probe"), "iniconfig==2.0.0"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    if probe.returncode:
        pytest.skip("no package index can be reached: " + probe.stderr.strip()[-200:])
    code = machine.send(requirements_DOT_txt="iniconfig==2.0.0\n")

    async def test() -> None:
        prepared = await machine.prepare(code, requirements="requirements.txt")
        version = "import importlib.metadata as m; print(m.version('iniconfig'))"
        assert run(prepared.python, version) == "2.0.0"

    asyncio.run(test())
