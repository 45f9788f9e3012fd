"""The compose file: a hub and four nodes that find each other without anybody's help."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.commands import refusal
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "compose.yaml"


def content() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text()))


def defaults(word: str) -> str:
    """Return a word with its variables at their defaults."""
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", word)


def test_there_are_a_hub_and_four_nodes() -> None:
    assert list(content()["services"]) == ["hub", "node1", "node2", "node3", "node4"]


def test_atoll_takes_every_command() -> None:
    for name, service in content()["services"].items():
        assert refusal([defaults(word) for word in service["command"]]) == "", name


def test_nodes_read_the_ticket_where_the_hub_writes_it() -> None:
    services = content()["services"]
    assert "--ticket-file=/ticket/ticket" in services["hub"]["command"]
    assert "ticket:/ticket" in services["hub"]["volumes"]
    homes = set()
    for name in ("node1", "node2", "node3", "node4"):
        service = services[name]
        assert service["command"][:2] == ["join", "@/ticket/ticket"]
        assert "ticket:/ticket:ro" in service["volumes"]
        assert service["hostname"] == name
        homes |= {mount.split(":")[0] for mount in service["volumes"]} - {"ticket"}
        assert not any(mount.startswith("hub:") for mount in service["volumes"])
    assert len(homes) == 4  # each is a node of its own, also after a restart
    assert {*homes, "hub", "ticket"} == set(content()["volumes"])


def test_images_are_built_from_files_that_are_there() -> None:
    for service in content()["services"].values():
        context = (FILE.parent / service["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()


def test_nobody_has_more_rights_than_needed() -> None:
    for service in content()["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service


def test_compose_itself_reads_it() -> None:
    for command in (["docker", "compose"], ["docker-compose"], ["podman-compose"]):
        try:
            done = subprocess.run(
                [*command, "-f", str(FILE), "config"],
                capture_output=True, text=True, timeout=PATIENCE_S, check=False,
                env={**os.environ, "ATOLL_ADVERTISE": "hub.example.org"},
            )  # fmt: skip
        except FileNotFoundError:
            continue
        absent = ("is not a docker command", "unknown shorthand", "unknown flag", "have `podman`")
        if done.returncode and any(reason in done.stderr + done.stdout for reason in absent):
            continue
        assert done.returncode == 0, done.stderr
        services = yaml.safe_load(done.stdout)["services"]
        assert "--advertise=hub.example.org" in services["hub"]["command"]
        return
    pytest.skip("neither docker compose nor docker-compose nor podman-compose is installed")
