"""JSON over a WebSocket: who gets in, and what wrong messages are answered with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    options = HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


def opened(hub: HubServer, **options: Any) -> ClientConnection:
    url = hub.url.replace("http", "ws", 1) + "/api/queues/socket"
    found: ClientConnection = connect(url, proxy=None, **options)
    return found


def ask(socket: ClientConnection, **fields: Any) -> dict[str, Any]:
    socket.send(json.dumps(fields))
    found: dict[str, Any] = json.loads(socket.recv(timeout=PATIENCE_S))
    return found


def test_token_in_the_header_or_in_the_first_message(hub: HubServer) -> None:
    headers = {"Authorization": f"Bearer {hub.operator_token}"}
    with opened(hub, additional_headers=headers) as socket:
        assert "welcome" in json.loads(socket.recv(timeout=PATIENCE_S))
    with opened(hub) as socket:
        assert "welcome" in ask(socket, token=hub.operator_token)


@pytest.mark.parametrize("first", ['{"token": "wrong"}', "{}", "[]", "no json"])
def test_without_a_token_it_is_closed_with_a_reason(hub: HubServer, first: str) -> None:
    with opened(hub) as socket:
        socket.send(first)
        assert "error" in json.loads(socket.recv(timeout=PATIENCE_S))
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=PATIENCE_S)


def test_page_of_another_site_gets_no_connection(hub: HubServer) -> None:
    with pytest.raises(InvalidStatus):
        opened(hub, origin="https://elsewhere.example")


def test_answers_come_as_they_are_ready(hub: HubServer) -> None:
    with opened(hub) as socket:
        ask(socket, token=hub.operator_token)
        socket.send(json.dumps({"id": 1, "do": "claim", "queue": "pool/a", "wait_s": 60}))
        answers = [ask(socket, id="two", do="put", queue="pool/a", value=[1, None])]
        answers.append(json.loads(socket.recv(timeout=PATIENCE_S)))
        found = {answer["id"]: answer["done"] for answer in answers}
        assert found["two"]["duplicate"] is False
        (item,) = found[1]["items"]
        assert item["value"] == [1, None]
        assert "done" in ask(socket, id=3, do="ack", queue="pool/a", lease=item["lease"])
        lost = ask(socket, id=4, do="ack", queue="pool/a", lease=item["lease"])
        assert lost["id"] == 4


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"id": 1, "do": "steal"}', "verb"),
        ('{"id": 1, "do": ["put"]}', "verb"),
        ('{"id": 1, "do": {}}', "verb"),
        ('{"id": 1, "do": "put", "queue": 5, "value": 1}', "body of the request"),
        ('{"id": 1, "do": "put", "queue": "pool/x", "value": 1, "payload": ""}', "body"),
        ('{"id": 1, "do": "put", "queue": "pool/x", "payload": "%%"}', "body"),
        ('{"id": 1, "do": "put_many", "queue": "pool/x", "items": [3]}', "body"),
        ('{"id": 1, "do": "put", "queue": "pool/x", "key": "\\ud800", "value": 1}', "body"),
        ('{"id": 1, "do": "claim", "queue": "pool/\\udfff"}', "body"),
        ("[" * 100_000, "no JSON"),
        ("7", "no object"),
    ],
)
def test_wrong_message_is_answered_and_the_connection_stays(
    hub: HubServer, text: str, what: str
) -> None:
    with opened(hub) as socket:
        ask(socket, token=hub.operator_token)
        socket.send(text)
        assert what in json.loads(socket.recv(timeout=PATIENCE_S))["error"]["what"]
        assert "done" in ask(socket, id=9, do="put", queue="pool/fine", value=1)


def test_closed_connection_withdraws_its_claim(hub: HubServer) -> None:
    with opened(hub) as first:
        ask(first, token=hub.operator_token)
        first.send(json.dumps({"id": 1, "do": "claim", "queue": "pool/c", "wait_s": 600}))
        assert "done" in ask(first, id=2, do="put", queue="pool/other", value=1)
    with opened(hub) as second:
        ask(second, token=hub.operator_token)
        ask(second, id=1, do="put", queue="pool/c", value="mine")
        (item,) = ask(second, id=2, do="claim", queue="pool/c", wait_s=60)["done"]["items"]
        assert item["value"] == "mine"
