"""What `atoll hub` prints when it is ready."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from atoll.cli.commands.hub import show_ready
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer


def test_an_ipv6_address_is_printed_as_it_is(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "jobs", advertise="[fd00::1]:7700", reducers=False
    )
    with HubServer(options) as hub:
        show_ready(console, hub)
        assert hub.ticket.startswith("atoll://[fd00::1]:7700/")
        assert isinstance(console.file, io.StringIO)
        assert f"atoll join {hub.ticket}" in console.file.getvalue()
