"""Jobs in containers from the job file to the last line: a real hub, agent and daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.code import pack
from atoll.config import JobSpec, JobTable, LaunchTable, dump_spec
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.node.identity import image_signatures
from tests.containers.conftest import SMALL
from tests.containers.daemons import Daemon, import_image, linked_archive, small_archive
from tests.containers.registry import Registry
from tests.node.running import Node, all_lines, lines_of, until, wait_for


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs")) as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[HubClient]:
    with HubClient(hub.url, hub.operator_token) as made:
        yield made


@pytest.fixture
def start(daemon: Daemon, hub: HubServer, tmp_path: Path) -> Iterator[Callable[[], Node]]:
    nodes: list[Node] = []

    def begin() -> Node:
        nodes.append(Node(hub.ticket, tmp_path / "home", "--name", "n"))
        nodes[-1].ready()
        return nodes[-1]

    yield begin
    for node in nodes:
        with contextlib.suppress(ProcessLookupError):
            node.leave()
        node.end()
    assert daemon.names() == []


def submit(
    client: HubClient, *words: str, files: dict[str, str] | None = None, **launch: Any
) -> str:
    table = LaunchTable(launcher="container", **{"image": SMALL, **launch})
    script = next(iter(files)) if files else ""
    job = JobTable(name="job", command=list(words), script=script)
    return client.submit(dump_spec(JobSpec(job=job, launch=table)), files=files or {})


def test_containers_command_ends_with_its_lines_at_the_hub(
    hub: HubServer, client: HubClient, start: Callable[[], Node]
) -> None:
    start()
    assert hub.hub is not None
    nodes = hub.hub.membership.nodes
    until(lambda: "n" in nodes)
    assert nodes["n"].info.launchers == ["process", "container"]
    job = submit(client, "/bin/sh", "-c", "echo hello from $ATOLL_MEMBER")
    wait_for(client, job, "done")
    assert all_lines(client, job, last="hello from w0") == ["hello from w0"]


def test_command_that_fails_in_its_container_fails_the_job(
    client: HubClient, start: Callable[[], Node]
) -> None:
    start()
    job = submit(client, "/bin/sh", "-c", "echo why; exit 7")
    view = wait_for(client, job, "failed")
    assert view["error"]["kind"] == "ScriptError"
    assert "exit status 7" in view["error"]["what"]


def test_stop_ends_a_container(client: HubClient, start: Callable[[], Node]) -> None:
    start()
    job = submit(client, "/bin/sh", "-c", "echo up; sleep 60")
    until(lambda: lines_of(client, job))
    client.stop(job, grace_s=1.0)
    wait_for(client, job, "stopped")


@pytest.mark.long("tests/containers/test_agent_containers.py::test_stop_ends_a_container")
def test_successor_of_a_killed_agent_removes_its_container(
    client: HubClient, daemon: Daemon, start: Callable[[], Node]
) -> None:
    first = start()
    job = submit(client, "/bin/sh", "-c", "echo up; sleep 60")
    until(lambda: lines_of(client, job))
    (orphan,) = daemon.names()
    first.popen.send_signal(signal.SIGKILL)
    first.popen.wait()
    assert daemon.names() == [orphan], "a container outlives its agent"
    start()
    until(lambda: orphan not in daemon.names())
    client.stop(job, grace_s=0.1)
    wait_for(client, job, "stopped")


@pytest.mark.long(
    "tests/node/launchers/test_container_options.py::test_script_needs_an_image_with_atoll"
)
def test_script_in_an_image_with_atoll_joins_its_job(
    client: HubClient, daemon: Daemon, start: Callable[[], Node], tmp_path: Path
) -> None:
    python = os.path.realpath(sys.executable)
    label = f"LABEL atoll.python={python}"
    import_image(daemon, "linked:1", linked_archive(), label)
    packages = [sysconfig.get_paths()["purelib"], str(Path(atoll.__file__).parents[1])]
    folders = ["/usr", sys.base_prefix, *packages]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "node.toml").write_text(f"mounts = {folders}")
    start()
    script = "import atoll\nrun = atoll.join()\nprint('joined', *run.members)\nrun.finish()\n"
    job = submit(
        client,
        files={"s.py": script},
        image="linked:1",
        mounts=[f"{folder}:{folder}:ro" for folder in folders],
        env=[f"PYTHONPATH={':'.join(reversed(packages))}"],
    )
    until(lambda: client.job(job)["state"] in ("done", "failed"))
    assert client.job(job)["state"] == "done", (client.job(job), lines_of(client, job))
    assert all_lines(client, job, last="joined w0")[-1] == "joined w0"


def test_code_goes_into_a_container_and_artifacts_come_out(
    client: HubClient, start: Callable[[], Node], tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "input").write_text("from the folder")
    with pack(code) as packed:
        client.put_blob(packed.path)
    start()
    words = ["/bin/sh", "-c", "cat input > result; echo $PWD"]
    job = JobTable(name="job", command=words, code=f"sha256:{packed.sha256}", artifacts=["result"])
    table = LaunchTable(launcher="container", image=SMALL)
    made = client.submit(dump_spec(JobSpec(job=job, launch=table)), files={})
    wait_for(client, made, "done")
    all_lines(client, made, last=str(tmp_path / "home" / "jobs" / made / "w0" / "code"))
    client.get_file(made, "artifacts/w0/result", tmp_path / "back")
    assert (tmp_path / "back").read_text() == "from the folder"


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.every(2)
def test_owner_of_signed_images_gets_those_and_no_others(
    client: HubClient, start: Callable[[], Node], registry: Registry, tmp_path: Path, good: bool
) -> None:
    public = image_signatures.make_key(tmp_path / "anna.key")
    (tmp_path / "home").mkdir()
    policy = f'kinds = ["signed"]\ntrusted_keys = ["{public}"]\n'
    (tmp_path / "home" / "node.toml").write_text(policy)
    start()
    image = registry.add("signed", small_archive())
    key = image_signatures.load_key(tmp_path / "anna.key")
    signature = image_signatures.sign_image(image if good else f"other/{image}", key=key)
    job = submit(client, "echo", "trusted", image=image, signature=signature)
    if good:
        wait_for(client, job, "done")
        assert all_lines(client, job, last="trusted")[-1] == "trusted"
    else:
        view = wait_for(client, job, "failed")
        assert view["error"]["kind"] == "NotAllowed"
        assert registry.asked == [], "nothing is pulled before it is trusted"


def test_mount_that_the_owner_has_not_listed_is_refused(
    client: HubClient, start: Callable[[], Node]
) -> None:
    start()
    job = submit(client, "/bin/cat", "/etc-of-host/shadow", mounts=["/etc:/etc-of-host:ro"])
    until(lambda: "mount" in str(client.job(job)))
    assert lines_of(client, job) == []
