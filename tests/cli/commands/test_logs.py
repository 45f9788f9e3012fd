"""`atoll logs --member`: one machine or member, wherever it runs meanwhile."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from atoll.cli.commands.logs import _Printer
from atoll.errors import ConfigError


def printer(member: str) -> _Printer:
    return _Printer(Console(file=io.StringIO()), lines=0, all_=True, member=member)


def test_a_machine_that_its_member_has_left_is_still_followed() -> None:
    following = printer("kitchen")
    following._take({})  # nothing is placed yet
    following._take({"w0": "kitchen"})
    line = {"member": "w0", "text": "begun"}
    assert following._wanted([line]) == [line]
    following._take({"w0": "attic"})
    assert following._wanted([line]) == []


def test_a_name_that_the_job_never_had_is_refused() -> None:
    with pytest.raises(ConfigError, match="no machine or member"):
        printer("cellar")._take({"w0": "kitchen"})
