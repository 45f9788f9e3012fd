"""Launches that the hub may deliver again: the latest are recognized, older ones forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.agent.lone_agent import launch, lone_agent, program
from tests.node.launchers.ordering import run, until


def test_only_the_latest_launches_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.agent.agent.KNOWN_LAUNCHES", 3)

    async def scenario() -> None:
        async with lone_agent(tmp_path) as (agent, hub):
            await agent.drain("in use", source="person")  # so that nothing is started
            for member in ("w1", "w2", "w3", "w4", "w5", "w5"):
                hub.put(launch(program("true"), member=member, token=f"token of {member}"))
            await until(lambda: hub.acked == 6)
            await hub.ended("w5")
            assert hub.states("w5") == ["exited"]  # the repeated one did nothing
            assert len(agent._launched) == 3

    run(scenario())
