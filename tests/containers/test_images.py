"""Images that are pulled from a registry: when, how it is told, and what they say of themselves."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.config import JobSpec, JobTable, LaunchTable, dump_spec
from atoll.errors import ConfigError
from atoll.node.launchers.container import ContainerLauncher
from atoll.node.launchers.launcher import Exit
from atoll.node.processes import threads as in_thread_module
from atoll.wire.messages import Launch
from tests.containers.daemons import Daemon, small_archive
from tests.containers.registry import Registry
from tests.node.launchers.ordering import make_order, run, until
from tests.patience import PROMPT_S


def image_launch(image: str, *words: str, args: tuple[str, ...] = (), **launch: Any) -> Launch:
    spec = JobSpec(
        job=JobTable(name="job", command=list(words), args=list(args)),
        launch=LaunchTable(launcher="container", image=image, **launch),
    )
    return Launch("job-1", "w1", 1, "token", dump_spec(spec))


def to_end(command: Launch, root: Path, lines: list[str]) -> Exit:
    async def scenario() -> Exit:
        order = make_order(command, root)
        process = await ContainerLauncher(home=root, node="n").start(order, lines.append)
        return await process.wait()

    return run(scenario())


def test_pinned_image_is_pulled_once_and_told(
    tmp_path: Path, daemon: Daemon, registry: Registry
) -> None:
    pinned = registry.add("team/train", small_archive())
    lines: list[str] = []
    assert to_end(image_launch(pinned, "echo", "hello"), tmp_path, lines).code == 0
    assert lines[0] == f"pulls the image {pinned}"
    assert lines[1].startswith(f"has pulled the image {pinned}: 1 of 1 layers")
    assert lines[2:] == ["hello"]
    registry.asked.clear()
    lines.clear()
    to_end(image_launch(pinned, "echo", "again"), tmp_path, lines)
    assert lines == ["again"]
    assert registry.asked == []
    to_end(image_launch(pinned, "true", pull="always"), tmp_path, lines)
    assert registry.asked


def test_image_that_the_registry_lacks_is_the_jobs_own_fault(
    tmp_path: Path, daemon: Daemon, registry: Registry
) -> None:
    with pytest.raises(ConfigError, match="team/absent"):
        to_end(image_launch(registry.address("team/absent"), "true"), tmp_path, [])


def test_images_own_program_user_and_arguments_are_used(
    tmp_path: Path, daemon: Daemon, registry: Registry
) -> None:
    program = ["/bin/sh", "-c", 'id -u; touch mine && echo "$0 $1"']
    registry.add("own", small_archive(), Entrypoint=program, Cmd=["a", "b"], User="1234")
    lines: list[str] = []
    to_end(image_launch(registry.address("own"), args=("x", "y")), tmp_path, lines)
    assert lines[-2:] == ["1234", "x y"]
    assert (tmp_path / "job-1" / "w1" / "mine").stat().st_uid == 1234
    to_end(image_launch(registry.address("own"), args=()), tmp_path, lines)
    assert lines[-2:] == ["1234", "a b"]


def test_pull_that_nobody_wants_any_more_is_given_up(
    tmp_path: Path, daemon: Daemon, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_thread_module, "ENDING_S", 0.5)
    image = registry.add("slow", small_archive(("true",)))
    registry.open.clear()

    async def scenario() -> float:
        lines: list[str] = []
        order = make_order(image_launch(image, "true"), tmp_path)
        launcher = ContainerLauncher(home=tmp_path, node="n")
        starting = asyncio.create_task(launcher.start(order, lines.append))
        await until(lambda: any("/blobs/" in path for path in registry.asked))
        begun = time.monotonic()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        registry.open.set()
        return time.monotonic() - begun

    assert run(scenario()) < PROMPT_S
    assert daemon.names() == []
