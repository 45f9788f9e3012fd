"""Asks to parameter servers that never reach one."""

from __future__ import annotations

import pytest

from atoll.errors import WireError
from atoll.group.parameter_server_client import ParameterServerCalls
from atoll.wire.parameter_server_messages import Push
from tests.net.small_hub import SmallHub, linked


def test_an_ask_that_is_too_large_is_not_pending() -> None:
    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        calls = ParameterServerCalls(link, job="job")
        with pytest.raises(WireError, match="too many words"):
            calls.ask(Push(1, 1, 1, "fp32", [0] * 70_000), None, server=0)
        assert not calls._open
