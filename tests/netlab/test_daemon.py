"""Requests to the switch, without its devices."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from atoll.netlab.daemon import Daemon, _listen
from atoll.netlab.shape import Shape
from atoll.netlab.switch import Switch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")


@pytest.mark.parametrize("line", ["[]", "7", "{", '{"do": "cut", "host": 9, "cut": true}'])
def test_a_wrong_request_does_not_end_the_switch(tmp_path: Path, line: str) -> None:
    with _listen(tmp_path / "s") as requests:
        daemon = Daemon(Switch([Shape()]), [], requests)
        answers = []
        for sent in (line, json.dumps({"do": "stats"})):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / "s"))
                client.sendall(sent.encode() + b"\n")
                daemon._answer()
                answers.append(client.recv(1 << 16))
    assert answers[0] == b""
    assert len(json.loads(answers[1])) == 1
