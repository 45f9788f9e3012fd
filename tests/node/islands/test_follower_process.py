"""A follower host from the command to the report of its end, as the agent of its node sees it."""

from __future__ import annotations

from pathlib import Path

from atoll.config import parse_spec
from atoll.wire.limits import EXIT_LEFT
from atoll.wire.messages import Stop
from tests.node.agent.lone_agent import launch, lone_agent
from tests.node.launchers.ordering import run, until
from tests.patience import PATIENCE_S

SPEC = """
[job]
name = "wide"
[strategy]
inner = "fsdp"
[island]
ranks = 2
machines = 2
"""


def test_the_agent_reports_a_follower_that_runs_and_leaves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lone_agent(tmp_path) as (agent, hub):
            hub.put(launch(parse_spec(SPEC), member="w1.1"))
            await until(lambda: hub.states("w1.1") == ["starting", "running"])
            assert agent.running == ["job-1/w1.1"]
            await until(lambda: hub.lines)  # it listens to signals by now
            hub.put(Stop("job-1", "w1.1", PATIENCE_S))
            end = await hub.ended("w1.1")
            assert (end.exit_code, end.error) == (EXIT_LEFT, None)
            assert (tmp_path / "jobs" / "job-1" / "w1.1" / "job.toml").exists()

    run(scenario())
