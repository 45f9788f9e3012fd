"""Preparing a process: code is fetched once, environments are built once, both are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.code import pack
from atoll.config import JobSpec, JobTable
from atoll.errors import ConfigError, HubError, HubUnreachable, JobError
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.api import HubClient
from atoll.node import venvs
from atoll.node.preparing import Prepared, Preparer
from atoll.wire.messages import Launch
from tests.node.packages import wheel

COMMAND = Launch(job="job", member="w0", slot=0, token="token", spec="")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


class Machine:
    """An agent's home, and a person who sends code to the hub."""

    def __init__(self, hub: HubServer, folder: Path, **limits: Any) -> None:
        self.hub = hub
        self.folder = folder
        self.home = folder / "home"
        self.lines: list[str] = []
        self.asked: list[str] = []
        self.preparer = Preparer(self.home, self._client, **limits)

    def _client(self, token: str) -> HubClient:
        self.asked.append(token)
        return HubClient(self.hub.url, self.hub.operator_token)

    def send(self, **files: str | bytes) -> str:
        """Send a folder with these files; return what `code` of its job is."""
        source = self.folder / f"source-{time.monotonic_ns()}"
        source.mkdir()
        for name, content in files.items():
            path = source / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pack(source) as packed, self._client("") as client:
            return f"sha256:{client.put_blob(packed.path)}"

    async def prepare(
        self, code: str, *, requirements: str = "", member: str = "w0", at: Path | None = None
    ) -> Prepared:
        spec = JobSpec(job=JobTable(code=code, requirements=requirements))
        directory = at or self.folder / "work" / member
        return await self.preparer.prepare(
            COMMAND, spec, directory=directory, on_line=self.lines.append
        )

    def kept(self, kind: str) -> list[str]:
        """Return the packs (`code`) or the environments (`venvs`) in the cache."""
        found = (self.home / kind).glob("*.tar.gz" if kind == "code" else "*/ready.json")
        return [path.parent.name if kind == "venvs" else path.name[:-7] for path in found]


@pytest.fixture
def machine(hub: HubServer, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path)


def with_package(name: str, **more: str | bytes) -> dict[str, str | bytes]:
    """Return the files of a project whose requirements are a package that it carries along."""
    return {
        f"{name}-1.0-py3-none-any_DOT_whl": wheel(name),
        "requirements_DOT_txt": f"--no-index\n./{name}-1.0-py3-none-any.whl\n",
        **more,
    }


def run(python: Path, code: str) -> str:
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd="/"
    )
    return done.stdout.strip()


# ------------------------------------------------------------------------------------ code


def test_a_job_without_code_works_in_its_own_folder(machine: Machine) -> None:
    prepared = asyncio.run(machine.prepare(""))
    assert prepared == Prepared(machine.folder / "work" / "w0", Path(sys.executable))
    assert machine.asked == []


def test_code_is_fetched_once_and_every_process_gets_a_fresh_copy(machine: Machine) -> None:
    code = machine.send(main_DOT_py="print(1)", data__table_DOT_csv="1,2")

    async def test() -> None:
        first = await machine.prepare(code, member="w0")
        assert first.folder == machine.folder / "work" / "w0" / "code"
        assert (first.folder / "data/table.csv").read_text() == "1,2"
        (first.folder / "main.py").write_text("changed")
        (first.folder / "left").write_text("behind")
        second = await machine.prepare(code, member="w1")
        assert (second.folder / "main.py").read_text() == "print(1)"
        again = await machine.prepare(code, member="w0")
        assert (again.folder / "main.py").read_text() == "print(1)"
        assert not (again.folder / "left").exists()

    machine.asked.clear()
    asyncio.run(test())
    assert machine.asked == ["token"]
    assert [line.partition(": ")[2] for line in machine.lines] == [
        "2 files, fetched", "2 files, in the cache", "2 files, in the cache"
    ]  # fmt: skip


def test_a_pack_that_was_damaged_on_the_disk_is_fetched_anew(machine: Machine) -> None:
    code = machine.send(main_DOT_py="print(1)")

    async def test() -> None:
        await machine.prepare(code)
        (kept,) = (machine.home / "code").glob("*.tar.gz")
        kept.write_bytes(kept.read_bytes()[:-9])
        prepared = await machine.prepare(code)
        assert (prepared.folder / "main.py").read_text() == "print(1)"

    asyncio.run(test())
    assert machine.asked.count("token") == 2


def test_code_that_the_hub_does_not_have_is_told(machine: Machine) -> None:
    with pytest.raises(HubError, match="does not have this blob"):
        asyncio.run(machine.prepare("sha256:" + "ab" * 32))
    assert machine.kept("code") == []


def test_a_hub_that_is_away_for_a_moment_is_asked_again(machine: Machine) -> None:
    code = machine.send(main_DOT_py="print(1)")
    fails = ["once", "twice"]

    class Flaky(HubClient):
        def get_blob(self, *arguments: Any, **more: Any) -> None:
            if fails:
                raise HubUnreachable(f"away {fails.pop()}")
            super().get_blob(*arguments, **more)

    machine.preparer = Preparer(
        machine.home, lambda token: Flaky(machine.hub.url, machine.hub.operator_token)
    )
    prepared = asyncio.run(machine.prepare(code))
    assert (prepared.folder / "main.py").read_text() == "print(1)"
    assert fails == []


def test_code_that_is_damaged_at_the_hub_is_told(machine: Machine) -> None:
    code = machine.send(main_DOT_py="print(1)")
    assert machine.hub.hub is not None
    path = machine.hub.hub.stores.blobs.path(code.removeprefix("sha256:"))
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(HubError, match="arrived damaged"):
        asyncio.run(machine.prepare(code))
    assert machine.kept("code") == []


def test_a_pack_that_must_not_be_unpacked_is_the_fault_of_the_job(machine: Machine) -> None:
    with HubClient(machine.hub.url, machine.hub.operator_token) as client:
        evil = client.put_blob(b"no pack at all")
    with pytest.raises(ConfigError, match="a pack of code is refused"):
        asyncio.run(machine.prepare(f"sha256:{evil}"))
    assert list((machine.folder / "work").rglob("*")) == [machine.folder / "work" / "w0"]


def test_packs_that_were_not_used_for_longest_go_first(hub: HubServer, tmp_path: Path) -> None:
    machine = Machine(hub, tmp_path, max_code_bytes=250_000)

    async def test() -> None:
        codes = [machine.send(data=os.urandom(100_000)) for _ in range(3)]
        first, second, third = [code.removeprefix("sha256:") for code in codes]
        await machine.prepare(codes[0])
        await machine.prepare(codes[1])
        await machine.prepare(codes[0])
        await machine.prepare(codes[2])
        assert sorted(machine.kept("code")) == sorted([first, third])
        assert second not in machine.kept("code")

    asyncio.run(test())


# ------------------------------------------------------------------------------ environments


def test_an_environment_has_the_jobs_packages_and_the_agents(machine: Machine) -> None:
    async def test() -> None:
        code = machine.send(**with_package("tiny_one"))
        prepared = await machine.prepare(code, requirements="requirements.txt")
        assert prepared.python != Path(sys.executable)
        told = run(
            prepared.python,
            "import tiny_one, atoll, psutil, sys; print(tiny_one.TEXT, sys.prefix);"
            " import importlib.util; print(importlib.util.find_spec('torch') is not None)",
        ).split()
        assert told == ["here", str(prepared.python.parent.parent), "True"]
        assert any("Successfully installed tiny" in line for line in machine.lines)
        machine.preparer.release(prepared)

    asyncio.run(test())
    with pytest.raises(subprocess.CalledProcessError):
        run(Path(sys.executable), "import tiny_one")  # the agent's own Python is as it was


def test_a_package_comes_before_the_agents_own_of_that_name(machine: Machine) -> None:
    async def test() -> None:
        code = machine.send(
            **{"psutil-0.1-py3-none-any_DOT_whl": wheel("psutil", "0.1", text="mine")},
            requirements_DOT_txt="--no-index\n./psutil-0.1-py3-none-any.whl\n",
        )
        prepared = await machine.prepare(code, requirements="requirements.txt")
        assert run(prepared.python, "import psutil; print(psutil.TEXT)") == "mine"

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
from atoll.node.file_locks import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.try_lock(shared=False)
print("locked", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(os.name != "posix", reason="shared locks are those of POSIX")
def test_another_agents_build_is_waited_for_and_its_death_frees_the_lock(
    machine: Machine,
) -> None:
    code = machine.send(**with_package("tiny_three"))

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
            assert (await asyncio.wait_for(task, 10)).python == prepared.python

    asyncio.run(test())


def test_what_pip_cannot_do_is_told_with_its_last_lines_and_leaves_nothing(
    machine: Machine,
) -> None:
    code = machine.send(r_DOT_txt="--no-index\n--find-links .\nno-such-package-of-atoll==9.9\n")
    with pytest.raises(ConfigError, match=r"no-such-package-of-atoll==9\.9") as caught:
        asyncio.run(machine.prepare(code, requirements="r.txt"))
    assert "pip install" in caught.value.message()
    assert machine.kept("venvs") == []
    assert [path for path in (machine.home / "venvs").iterdir() if path.is_dir()] == []


def test_a_network_that_fails_is_not_the_fault_of_the_job(machine: Machine) -> None:
    nobody = "--index-url http://127.0.0.1:9/simple"
    code = machine.send(r_DOT_txt=f"{nobody}\nno-such-package-of-atoll\n")
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


async def until(condition: Any, *, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_a_build_that_is_cancelled_ends_with_all_it_started_and_leaves_nothing(
    machine: Machine, tmp_path: Path
) -> None:
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


def test_a_build_that_takes_too_long_is_ended(hub: HubServer, tmp_path: Path) -> None:
    machine = Machine(hub, tmp_path, build_s=6.0)
    note = tmp_path / "pid"
    with pytest.raises(JobError, match="not ready in time"):
        asyncio.run(machine.prepare(slow_code(machine, note), requirements="r.txt"))
    assert gone(int(note.read_text()))
    assert [path for path in (machine.home / "venvs").iterdir() if path.is_dir()] == []


def test_what_an_agent_that_was_killed_left_half_built_is_built_anew(machine: Machine) -> None:
    code = machine.send(**with_package("tiny_four"))

    async def test() -> None:
        prepared = await machine.prepare(code, requirements="requirements.txt")
        machine.preparer.release(prepared)
        folder = prepared.python.parent.parent
        (folder / "ready.json").unlink()
        (folder / "bin").rename(folder / "half")
        again = await machine.prepare(code, requirements="requirements.txt")
        assert run(again.python, "import tiny_four; print(tiny_four.TEXT)") == "here"
        assert not (folder / "half").exists()

    asyncio.run(test())


def test_environments_that_nobody_uses_make_room_and_those_in_use_stay(
    hub: HubServer, tmp_path: Path
) -> None:
    machine = Machine(hub, tmp_path, max_venv_bytes=1)

    async def prepare(name: str) -> Prepared:
        code = machine.send(**with_package(name))
        return await machine.prepare(code, requirements="requirements.txt", member=name)

    async def test() -> None:
        used, unused = await prepare("tiny_five"), await prepare("tiny_six")
        machine.preparer.release(unused)
        newest = await prepare("tiny_seven")
        assert used.python.exists()
        assert newest.python.exists()
        assert not unused.python.exists()
        machine.preparer.release(used)
        await prepare("tiny_eight")
        assert not used.python.exists()

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
def test_requirements_that_refer_to_the_code_are_told_from_those_that_do_not(
    text: str, alone: bool
) -> None:
    def key(code: str) -> str:
        return venvs.Recipe(requirements=text, name="r.txt", code=code, folder=Path()).key()

    assert (key("one") == key("two")) is alone


def test_a_package_of_the_index_is_installed(machine: Machine) -> None:
    probe = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "-q",
         "-d", str(machine.folder / "probe"), "iniconfig==2.0.0"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    if probe.returncode:
        pytest.skip("no package index can be reached: " + probe.stderr.strip()[-200:])
    code = machine.send(requirements_DOT_txt="iniconfig==2.0.0\n")

    async def test() -> None:
        prepared = await machine.prepare(code, requirements="requirements.txt")
        version = "import importlib.metadata as m; print(m.version('iniconfig'))"
        assert run(prepared.python, version) == "2.0.0"

    asyncio.run(test())


def test_the_hash_of_a_pack_is_that_of_its_blob(machine: Machine) -> None:
    code = machine.send(main_DOT_py="print(1)")
    asyncio.run(machine.prepare(code))
    (kept,) = (machine.home / "code").glob("*.tar.gz")
    assert code == f"sha256:{hashlib.sha256(kept.read_bytes()).hexdigest()}"
