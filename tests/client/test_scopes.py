"""A program's ticket may permit only queues and topics below some names."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

import atoll
from atoll.errors import AtollError, AuthError, ConfigError
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.ids import is_job_id
from atoll.net.http.client import HubClient
from tests.patience import PATIENCE_S


def options(folder: Path) -> HubOptions:
    return HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False)


def test_a_program_keeps_to_the_names_of_its_ticket(tmp_path: Path, home: Path) -> None:
    with HubServer(options(tmp_path)) as hub:
        with HubClient(hub.url, hub.operator_token) as client:
            ticket = client.create_ticket(role="program", uses=1, queues=["pool/ada"])
            assert next(row["queues"] for row in client.tickets()) == ["pool/ada"]
        with atoll.connect(ticket, home=home, name="ada") as program:
            program.queue("pool/ada/work", max_items=10).put(1)
            program.topic("pool/ada").publish({"round": 1})
            for other in ("pool/work", "pool/adam", "pool"):
                with pytest.raises(AtollError):
                    program.queue(other + "/x" * ("/" not in other)).put(1)
            with pytest.raises(AuthError, match="permits other queues and topics") as caught:
                program.topic("pool/news").publish({"round": 1})
            assert caught.value.expected == "pool/ada/..."
            assert answers(hub, program.token) == (200, 403, 403)
    with HubServer(options(tmp_path)) as again:
        assert answers(again, program.token) == (200, 403, 403)


def test_a_program_does_not_wait_in_the_queues_of_a_job_to_come(tmp_path: Path, home: Path) -> None:
    """Its id can be foreseen: who waits there first would get what the job puts there."""
    spec = "[job]\nname = 'toy'\nnodes = 1\n"
    with HubServer(options(tmp_path)) as hub:
        with HubClient(hub.url, hub.operator_token) as client:
            ticket = client.create_ticket(role="program", uses=1)
            made = [client.submit(spec) for _ in range(2)]
        assert all(is_job_id(job) for job in made)
        year = str(int(made[0].split("-")[1]) + 10_000)
        foreseen = f"toy-{year}-120000"
        with atoll.connect(ticket, home=home, name="ada") as program:
            for name in (*made, foreseen, f"{foreseen}-2"):
                with pytest.raises(AuthError, match="queues of a job"):
                    program.queue(f"{name}/experience").claim()
                with pytest.raises(AuthError, match="queues of a job"):
                    program.topic(f"{name}/weights").publish({"round": 1})
            program.queue("toy-2026/experience").put(1)


def answers(hub: HubServer, token: str) -> tuple[int, int, int]:
    """Return the status of a permitted put, of another one, and of the other's dead letters."""
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(
        base_url=hub.url, headers=headers, trust_env=False, timeout=PATIENCE_S
    ) as plain:
        puts = [
            plain.post("/api/queues/put", json={"queue": name, "value": 2}).status_code
            for name in ("pool/ada/work", "pool/work")
        ]
        dead = plain.get("/api/queues/dead", params={"queue": "pool/work"}).status_code
    return puts[0], puts[1], dead


@pytest.mark.parametrize(
    ("role", "queues", "why"),
    [
        ("viewer", ["pool/ada"], "only a program's ticket"),
        ("program", ["node/box"], "these queues are the nodes'"),
        ("program", ["pool/../x"], "cannot be used as a name"),
        ("program", ["a"] * 65, "too many names"),
    ],
)
def test_wrong_names_make_no_ticket(hub: HubServer, role: str, queues: list[str], why: str) -> None:
    with HubClient(hub.url, hub.operator_token) as client, pytest.raises(ConfigError, match=why):
        client.create_ticket(role=role, queues=queues)
