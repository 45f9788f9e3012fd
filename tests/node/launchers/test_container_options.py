"""What a container is made with, where it takes no daemon to see it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from atoll.config import JobSpec, JobTable, LaunchTable, NeedsTable, container_hosts, dump_spec
from atoll.errors import ConfigError
from atoll.node.launchers.container_options import (
    ImageFacts,
    container_options,
    container_user,
    image_facts,
    make_writable,
)
from atoll.node.launchers.launcher import Order, ResourceCaps
from atoll.wire.messages import Launch
from tests.node.launchers.ordering import make_order

LABELS = {"atoll.job": "job-1", "atoll.member": "w1", "atoll.attempt": "2"}
ATOLL = ImageFacts(python="/opt/python")


def order(
    root: Path, *, job: JobTable | None = None, needs: NeedsTable | None = None, **launch: Any
) -> Order:
    spec = JobSpec(
        job=job or JobTable(command=["run", "it"]),
        needs=needs or NeedsTable(),
        launch=LaunchTable(launcher="container", image="i:1", **launch),
    )
    return make_order(Launch("job-1", "w1", 1, "t", dump_spec(spec)), root)


def options(made: Order, *, image: ImageFacts | None = None, user: str = "5:6") -> dict[str, Any]:
    return container_options(made, image or ImageFacts(), user=user, labels=LABELS)


def test_every_container_has_no_rights_and_its_own_folder_only(tmp_path: Path) -> None:
    made = options(order(tmp_path))
    assert made["cap_drop"] == ["ALL"]
    assert made["security_opt"] == ["no-new-privileges"]
    assert "privileged" not in made
    assert made["user"] == "5:6"
    assert [mount["Source"] for mount in made["mounts"]] == [str(tmp_path / "job-1" / "w1")]
    assert made["labels"] == LABELS


def test_nothing_of_the_agents_environment_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_OWNER", "x")
    environment = options(order(tmp_path, env=["MINE=1"]))["environment"]
    assert environment["MINE"] == "1"
    assert environment["HOME"] == environment["ATOLL_DIRECTORY"]
    assert "SECRET_OF_THE_OWNER" not in environment
    assert "PATH" not in environment


def test_authority_of_the_hub_is_there_for_reading(tmp_path: Path) -> None:
    made = order(tmp_path)
    made = dataclasses.replace(made, variables={**made.variables, "ATOLL_CA": "/home/ca.pem"})
    mount = options(made)["mounts"][1]
    assert (mount["Source"], mount["Target"]) == ("/home/ca.pem", "/home/ca.pem")
    assert mount["ReadOnly"] is True


@pytest.mark.parametrize(
    ("needs", "gpus", "requests"),
    [
        (NeedsTable(), (0,), None),
        (NeedsTable(gpu="any"), None, {"Count": -1}),
        (NeedsTable(gpu="any"), (1,), {"DeviceIDs": ["1"]}),
    ],
)
def test_accelerators_are_given_to_those_who_need_them(
    tmp_path: Path, needs: NeedsTable, gpus: tuple[int, ...] | None, requests: dict[str, Any] | None
) -> None:
    made = dataclasses.replace(order(tmp_path, needs=needs), caps=ResourceCaps(gpus=gpus))
    found = options(made).get("device_requests", [])
    if requests is None:
        assert found == []
    else:
        (request,) = found
        assert requests.items() <= request.items()
        assert request["Capabilities"] == [["gpu"]]


def test_niceness_is_weight_by_the_kernels_own_scale(tmp_path: Path) -> None:
    weights = [
        options(dataclasses.replace(order(tmp_path), caps=ResourceCaps(nice=nice))).get(
            "cpu_shares"
        )
        for nice in (0, 1, 10, 19)
    ]
    assert weights == [None, 819, 110, 15]


@pytest.mark.parametrize(
    ("job", "image", "program"),
    [
        (JobTable(command=["a", "b"], args=["c"]), ATOLL, (["a"], ["b", "c"])),
        (JobTable(script="s.py"), ATOLL, (["/opt/python"], ["-P", "-m", "atoll.node.worker"])),
        (JobTable(), ATOLL, (["/opt/python"], ["-P", "-m", "atoll.node.worker"])),
        (JobTable(args=["x"]), ImageFacts(), (None, ["x"])),
        (JobTable(), ImageFacts(), (None, None)),
    ],
)
def test_program_is_the_jobs_else_atolls_else_the_images_own(
    tmp_path: Path, job: JobTable, image: ImageFacts, program: tuple[Any, Any]
) -> None:
    made = options(order(tmp_path, job=job), image=image)
    assert (made.get("entrypoint"), made.get("command")) == program


def test_script_needs_an_image_with_atoll(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"labelled atoll\.python"):
        options(order(tmp_path, job=JobTable(script="s.py")))


@pytest.mark.parametrize(
    ("hub", "network", "works"),
    [
        ("http://127.0.0.1:80", "bridge", False),
        ("http://localhost:80", "bridge", False),
        ("https://[::1]:80", "bridge", False),
        ("https://192.168.1.5:80/atoll", "bridge", True),
        ("http://127.0.0.1:80", "host", True),
        ("http://127.0.0.1:80", "none", True),
    ],
)
def test_network_that_cannot_reach_the_hub_is_refused(
    tmp_path: Path, hub: str, network: str, works: bool
) -> None:
    made = order(tmp_path, network=network)
    made = dataclasses.replace(made, variables={**made.variables, "ATOLL_HUB": hub})
    if works:
        assert options(made)["network_mode"] == network
    else:
        with pytest.raises(ConfigError, match="cannot reach this hub"):
            options(made)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="users have no numbers on this system")
@pytest.mark.parametrize(
    ("uid", "image_user", "rootless", "user"),
    [
        (1000, "", False, "1000:100"),
        (0, "", False, "65534:65534"),
        (1000, "", True, ""),
        (0, "app", False, ""),
        (1000, "0", False, ""),
    ],
)
def test_container_user_is_never_the_hosts_root(
    monkeypatch: pytest.MonkeyPatch, uid: int, image_user: str, rootless: bool, user: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(os, "getegid", lambda: 100)
    assert container_user(ImageFacts(user=image_user), rootless=rootless) == user


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="users have no numbers on this system")
def test_unknown_user_may_write_and_no_link_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("x")
    outside.chmod(0o600)
    directory = tmp_path / "jobs" / "j" / "w0"
    directory.mkdir(parents=True)
    (directory / "file").write_text("x")
    (directory / "link").symlink_to(outside)
    make_writable(directory, user="app")
    assert directory.stat().st_mode & 0o777 == 0o777
    assert (directory / "file").stat().st_mode & 0o006 == 0o006
    assert outside.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "jobs").stat().st_mode & 0o777 == 0o700


def test_what_an_image_says_of_itself_is_read() -> None:
    assert image_facts({"Config": None}) == ImageFacts()
    config = {"User": "app", "Labels": {"atoll.python": "/p"}, "StopSignal": "SIGINT"}
    assert image_facts({"Config": config}) == ImageFacts("app", "/p", "SIGINT")


def test_daemon_is_found_as_named_or_at_usual_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://box:2375")
    assert container_hosts() == ["tcp://box:2375"]
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "podman").mkdir()
    (tmp_path / "podman" / "podman.sock").touch()
    assert f"unix://{tmp_path}/podman/podman.sock" in container_hosts()
