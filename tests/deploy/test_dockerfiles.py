"""The Dockerfiles say what can be done; the hub's steps are done for real, and the hub starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import ssl
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bench.kit.ports import free_port
from tests.deploy.commands import refusal
from tests.deploy.conftest import INSTALL_S
from tests.deploy.dockerfiles import ROOT, context, read
from tests.patience import PATIENCE_S
from tests.tiers import sampled

FILES = ["hub.Dockerfile", "node.Dockerfile"]
KNOWN = {
    "ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL",
    "HEALTHCHECK", "ENTRYPOINT", "CMD", "LABEL",
}  # fmt: skip

LARGEST_HUB_BYTES = 130_000_000
"""Of the environment of a hub without extras."""


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(project["optional-dependencies"])


def last(name: str, word: str) -> str:
    return [step.rest for step in read(name) if step.word == word][-1]


@pytest.mark.parametrize("name", FILES)
def test_every_instruction_is_known_and_what_is_copied_is_there(name: str, tmp_path: Path) -> None:
    context(tmp_path / "context")
    stages: list[str] = []
    for step in read(name):
        assert step.word in KNOWN, step
        if step.word == "FROM" and " AS " in step.rest:
            stages.append(step.rest.rpartition(" ")[2])
        if step.word == "COPY" and step.rest.startswith("--from="):
            assert step.rest.split()[0].removeprefix("--from=") in stages
        elif step.word == "COPY":
            *sources, _ = step.rest.split()
            assert [s for s in sources if not (tmp_path / "context" / s).exists()] == []


def test_secrets_and_data_stay_out_of_the_images(tmp_path: Path) -> None:
    context(tmp_path / "context")
    there = sorted(path.name for path in (tmp_path / "context").iterdir())
    assert there == ["LICENSE", "README.md", "atoll", "pyproject.toml"]


@pytest.mark.parametrize("name", FILES)
def test_extras_that_are_installed_exist(name: str) -> None:
    (line,) = [s.rest for s in read(name) if s.word == "ARG" and s.rest.startswith("EXTRAS=")]
    named = [extra for extra in line.partition("=")[2].strip('"').split(",") if extra]
    assert set(named) <= set(extras())
    assert bool(named) is (name == "node.Dockerfile")


@pytest.mark.parametrize("name", FILES)
def test_image_runs_a_valid_command_without_root(name: str) -> None:
    assert json.loads(last(name, "ENTRYPOINT")) == ["atoll"]
    assert refusal(json.loads(last(name, "CMD"))) == ""
    user, _, _ = last(name, "USER").partition(":")
    assert int(user) > 0
    assert f"--uid {user} " in last(name, "RUN")
    assert last(name, "STOPSIGNAL") == "SIGTERM"


def test_the_node_says_where_its_python_is() -> None:
    assert last("node.Dockerfile", "LABEL") == "atoll.python=/opt/atoll/bin/python"
    assert "/opt/atoll" in last("node.Dockerfile", "COPY")


def installing(name: str) -> str:
    """Return the step that installs Atoll, as a shell runs it without build arguments."""
    (step,) = [s.rest for s in read(name) if s.word == "RUN" and '".' in s.rest]
    return step


@pytest.fixture(scope="module")
def hub_environment(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    """Do what the hub's image does to install it, in a folder of this machine."""
    folder = tmp_path_factory.mktemp("image")
    context(folder / "source")
    script = installing("hub.Dockerfile").replace("/opt/atoll", str(folder / "atoll"))
    script = script.replace("python -m venv", f"{shlex.quote(sys.executable)} -m venv", 1)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "EXTRAS": ""}
    done = subprocess.run(
        ["sh", "-ec", script], cwd=folder / "source", capture_output=True, text=True,
        timeout=INSTALL_S, check=False, env={**os.environ, **offline},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "atoll"


def installed(environment: Path) -> set[str]:
    code = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
    done = subprocess.run(
        [environment / "bin/python", "-c", code],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    names = {name.lower().replace("_", "-") for name in done.stdout.split()}
    assert {"atoll", "starlette"} <= names
    return names


@pytest.mark.long("tests/deploy/test_dockerfiles.py::test_extras_that_are_installed_exist")
def test_the_hub_is_small_and_without_torch(hub_environment: Path) -> None:
    optional = {re.split(r"[\[<>=]", line)[0] for lines in extras().values() for line in lines}
    optional -= {"atoll", "httpx"}  # `proxy` adds something to httpx, which is always there
    assert installed(hub_environment) & {*optional, "pip", "setuptools"} == set()
    nbytes = sum(path.lstat().st_size for path in hub_environment.rglob("*"))
    print(f"{nbytes / 1e6:.0f} MB")
    assert nbytes < LARGEST_HUB_BYTES


@pytest.mark.parametrize(
    "environment",
    sampled(
        ["this one", "the image's"],
        lambda environment: environment == "this one",
        "tests/deploy/test_dockerfiles.py::test_the_hub_of_the_image_starts_serves_and_ends",
    ),
)
def test_the_hub_of_the_image_starts_serves_and_ends(
    environment: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    programs = Path(sys.executable).parent
    if environment != "this one":
        programs = request.getfixturevalue("hub_environment") / "bin"
    port = free_port()
    words = [*json.loads(last("hub.Dockerfile", "CMD")), "--port", str(port)]
    words = [word.replace("/data", str(tmp_path)) for word in words]
    words += ["--advertise", "127.0.0.1", "--ticket-file", str(tmp_path / "ticket")]
    variables = {**os.environ, "ATOLL_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    hub = subprocess.Popen(
        [programs / "atoll", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables,
    )  # fmt: skip
    try:
        assert hub.stdout is not None
        lines: list[str] = []
        for line in hub.stdout:
            lines.append(line)
            if "atoll run" in line:
                break
        assert (tmp_path / "ticket").read_text().startswith("atoll://127.0.0.1:"), lines
        check: Any = json.loads(last("hub.Dockerfile", "HEALTHCHECK").partition(" CMD ")[2])
        code = check[2].replace("7700", str(port))
        code, limits = re.subn(r"timeout=\d+", f"timeout={PATIENCE_S}", code)  # it may be busy
        assert limits == 1
        probe = [programs / check[0], check[1], code]
        done = subprocess.run(
            probe, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        context_ = ssl.create_default_context()
        context_.check_hostname, context_.verify_mode = False, ssl.CERT_NONE
        page = urllib.request.urlopen(
            f"https://127.0.0.1:{port}/", context=context_, timeout=PATIENCE_S
        )
        assert page.status == 200
        page.close()
        status = subprocess.run(
            [programs / "atoll", "status"],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=variables,
        )  # fmt: skip
        assert status.returncode == 0, status.stdout + status.stderr
    finally:
        hub.terminate()
        rest = hub.communicate(timeout=PATIENCE_S)[0]
    assert hub.returncode == 0, rest
