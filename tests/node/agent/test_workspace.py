"""Code of a job on its way to a process: fetched once, checked, a fresh copy for each."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConfigError, HubError, HubUnreachable
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.node.agent.workspace import Workspace, WorkspaceBuilder
from tests.node.agent.preparing_machine import Machine


def test_a_job_without_code_works_in_its_own_folder(machine: Machine) -> None:
    prepared = asyncio.run(machine.prepare(""))
    assert prepared == Workspace(machine.folder / "work" / "w0", Path(sys.executable))
    assert machine.requests == []


def test_code_is_fetched_once_and_copied_per_process(machine: Machine) -> None:
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

    machine.requests.clear()
    asyncio.run(test())
    assert machine.requests == ["token"]
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
    assert machine.requests.count("token") == 2


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

    machine.preparer = WorkspaceBuilder(
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


def test_unsafe_pack_fails_the_job(machine: Machine) -> None:
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


def test_the_hash_of_a_pack_is_that_of_its_blob(machine: Machine) -> None:
    code = machine.send(main_DOT_py="print(1)")
    asyncio.run(machine.prepare(code))
    (kept,) = (machine.home / "code").glob("*.tar.gz")
    assert code == f"sha256:{hashlib.sha256(kept.read_bytes()).hexdigest()}"
