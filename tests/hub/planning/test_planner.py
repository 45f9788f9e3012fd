"""The process that plans: what it may take of the hub's machine."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from atoll.hub.planning import planner as planner_module
from atoll.hub.planning.planner import NICENESS, Planner


def test_plans_do_not_take_the_processor_from_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.name != "posix":
        pytest.skip("priorities of processes are of POSIX")
    program = "import os; print('{\"nice\": %d}' % os.nice(0))"
    monkeypatch.setattr(planner_module, "COMMAND", (sys.executable, "-c", program))
    asked = Planner(data=tmp_path, torch=True).ask("", [{"node": "box", "state": "online"}])
    assert asyncio.run(asked)["nice"] == min(19, os.nice(0) + NICENESS)
