"""Files for SkyPilot, dstack and Ansible: what they start, and that these programs take them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from tests.e2e.conftest import ROOT, until
from tests.patience import PATIENCE_S

SKY, DSTACK, PLAYBOOK = (
    ROOT / "deploy" / f"{name}.yaml" for name in ("skypilot", "dstack", "ansible")
)


def load(file: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(("file", "words"), [(SKY, "run"), (DSTACK, "commands")])
def test_each_joins_with_the_ticket_of_its_environment(file: Path, words: str) -> None:
    told = load(file)
    commands = told[words] if isinstance(told[words], str) else "\n".join(told[words])
    assert "atoll.cli join" in commands
    assert "ATOLL_TICKET" in {**told.get("secrets", {})} or "ATOLL_TICKET" in told.get("env", [])
    assert "atoll://" not in file.read_text(encoding="utf-8")
    checked = subprocess.run(["sh", "-n"], input=commands, text=True, check=False)
    assert checked.returncode == 0


def test_skypilot_takes_its_file() -> None:
    sky: Any = pytest.importorskip("sky", reason="pip install skypilot")
    given = [("ATOLL_TICKET", "atoll://hub/secret")]
    task = sky.Task.from_yaml_config(load(SKY), secrets_overrides=given)
    assert task.num_nodes == 4


def test_dstack_takes_its_file() -> None:
    room = "dstack._internal.core.models.configurations"  # what `dstack apply` reads files with
    dstack: Any = pytest.importorskip(room, reason="pip install dstack")
    assert dstack.parse_run_configuration(load(DSTACK)).nodes == 4


def test_ansible_makes_a_machine_a_node_and_removes_it(tmp_path: Path) -> None:
    program = shutil.which("ansible-playbook")
    if program is None:
        pytest.skip("pip install ansible-core")
    folder = tmp_path / "atoll"
    folder.mkdir()
    (folder / "venv").symlink_to(sys.prefix)  # it has Atoll: nothing is installed
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as hub, HubClient(hub.url, hub.operator_token) as client:
        ticket = client.create_ticket(role="node", uses=1, valid_s=600.0, name="", quotas={})
        environment = os.environ | {"ATOLL_TICKET": ticket, "ATOLL_FOLDER": str(folder)}

        interpreter = ("-e", f"ansible_python_interpreter={sys.executable}")

        def play(*words: str) -> str:
            done = subprocess.run(
                [program, "-i", "localhost,", "-c", "local", str(PLAYBOOK), *interpreter, *words],
                env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        def states() -> list[str]:
            return [str(each["state"]) for each in client.nodes()]

        assert ticket.rpartition("/")[2] not in play()
        until(lambda: states() == ["online"])
        assert (folder / "ticket").stat().st_mode & 0o077 == 0
        play()  # again: the same node, started anew
        until(lambda: states() == ["online"])
        play("-e", "state=absent")
        until(lambda: "online" not in states())
        assert not folder.exists()
