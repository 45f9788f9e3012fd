"""Requests that no server can answer, which must not end the server that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.queues import InMemoryChannel
from atoll.routing import serving
from atoll.routing.features import FeatureModel
from atoll.routing.serving import Lanes, PathServer, publish_model
from tests.routing.test_folder import write_run
from tests.routing.test_together import Place


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": 5}, {"prompt": "a", "seed": 1 << 70}, {"prompt": "a", "tokens": -1},
        {"prompt": "a", "tokens": 10**9},
        {"prompt": "a", "temperature": float("nan")}, {"prompt": "a", "temperature": 1e-300},
        {"tokens": 1}, ["a"],
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_answered_says_why(
    tmp_path: Path, reader: FeatureModel, monkeypatch: pytest.MonkeyPatch, request_: Any
) -> None:
    monkeypatch.setattr(serving, "WAIT_S", 0.0)
    lanes = Lanes(Place(InMemoryChannel(), "w0"))
    (tmp_path / "run").mkdir()
    publish_model(lanes, write_run(tmp_path / "run", reader))
    server = PathServer(lanes, tmp_path / "server", server=0, servers=1)
    lanes.prompts.put(request_, key="one")
    server.route()
    for path in server.own:
        server.answer(path)
    (answer,) = lanes.answers.subscribe("client", start="oldest").read(10)
    assert answer.key == "one"
    assert "Error" in answer.value["error"]
