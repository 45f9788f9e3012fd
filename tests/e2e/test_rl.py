"""Jobs of reinforcement learning with real processes: results, kills, stops, and a fifth policy."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from atoll.cli.hub_access import KnownHub
from atoll.net.http.client import HubClient
from tests.e2e.conftest import Atoll, ticket_of, until, wait_for
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e
pytest.importorskip("gymnasium")

SMALL = """
[job]
name = "{name}"
[rl]
steps = {steps}
environments = 2
rollout = 32
epochs = 2
minibatches = 2
critic_epochs = 2
critic_minibatches = 2
hidden = [8]
critic_hidden = [8]
save_every = 4
{more}
"""
POLICY = """
[[rl.policies]]
name = "{name}"
env = "{env}"
"""
ENDLESS = 10_000_000
PACED = "tests.paced:cartpole"
OWN = """
import gymnasium

def make(render_mode=None):
    return gymnasium.make("CartPole-v1", render_mode=render_mode)
"""


def job(
    *policies: str, name: str = "tiny", steps: int = 1024, env: str = "CartPole-v1", more: str = ""
) -> str:
    """Return a small job file."""
    parts = [POLICY.format(name=policy, env=env) for policy in policies]
    return SMALL.format(name=name, steps=steps, more=more) + "".join(parts)


def hub_with(atoll: Atoll, *, slots: int) -> KnownHub:
    """Return a hub with one machine that runs so many members."""
    hub = atoll.hub()
    words = ["--name", "lap", "--no-measure", "--slots", str(slots)]
    popen = subprocess.Popen(
        [sys.executable, "-m", "atoll.node", *words, "--home", str(atoll.folder / "lap")],
        env={**atoll.environment(), "ATOLL_TICKET": ticket_of(hub)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    atoll.started.append(popen)
    with hub.client() as client:
        until(lambda: any(view["state"] == "online" for view in client.nodes()))
    return hub


def last(client: HubClient, name: str, member: str, value: str) -> float:
    """Return the last figure of a member, or -1."""
    points = client.metrics(name)["points"]
    found = [p["values"][value] for p in points if p["member"] == member and value in p["values"]]
    return float(found[-1]) if found else -1.0


def part(view: dict[str, Any], member: str) -> dict[str, Any]:
    """Return what a member told of its part."""
    (found,) = [one["result"]["rl"] for one in view["members"] if one["member"] == member]
    return dict(found)


@pytest.mark.long(
    "tests/rl/critic/test_roles.py::test_two_policies_and_their_critic_come_to_results"
)
def test_two_policies_and_a_critic_on_this_machine(atoll: Atoll) -> None:
    (atoll.folder / "mine").mkdir()
    (atoll.folder / "mine" / "worlds.py").write_text(OWN)
    own = POLICY.format(name="two", env="worlds:make")
    text = job("one").replace("[rl]", 'code = "mine"\n[rl]') + own
    (atoll.folder / "rl.toml").write_text(text)
    done = atoll.run("run", "rl.toml", "--local", "3")
    assert done.code == 0, done.both
    folder = atoll.job_folder()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rl"], summary
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files >= {
        "policy-one.safetensors", "policy-two.safetensors", "critic.safetensors",
        "episodes/one.gif", "episodes/two.gif",
    }  # fmt: skip
    assert (folder / "episodes" / "one.gif").read_bytes().startswith(b"GIF8")
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for point in points for name in point["values"]}
    assert names >= {"return", "env_steps", "env_steps_per_s", "policy_loss", "value_loss", "kl"}
    atoll.assert_ended()


def test_rl_members_resume_after_kill_leave_or_stop(
    atoll: Atoll,
) -> None:
    hub = hub_with(atoll, slots=3)
    with hub.client() as client:
        name = client.submit(job("one", "two", steps=ENDLESS, env=PACED))
        until(lambda: min(last(client, name, m, "env_steps") for m in ("w1", "w2")) > 2_000)

        before = last(client, name, "w1", "env_steps")
        atoll.worker("w1").kill()
        atoll.worker("w2").send_signal(signal.SIGTERM)
        left = last(client, name, "w2", "env_steps")
        until(lambda: goes_on(client, name, "w1") and goes_on(client, name, "w2"))
        until(lambda: last(client, name, "w1", "env_steps") > before)
        until(lambda: last(client, name, "w2", "env_steps") > left)

        version = last(client, name, "w0", "updates")
        atoll.worker("w0").kill()
        steps = last(client, name, "w1", "env_steps")
        until(lambda: last(client, name, "w1", "env_steps") > steps)
        until(lambda: last(client, name, "w0", "updates") > version)
        until(lambda: goes_on(client, name, "w0"))  # lines come by another way than figures

        client.stop(name, grace_s=PATIENCE_S)
        stopped = wait_for(client, name, "stopped")
        at = {member: part(stopped, member) for member in ("w0", "w1", "w2")}
        again = client.resume(name, spec=job("one", "two", env=PACED, more="record = false"))
        view = wait_for(client, again, "done")
    for member in ("w1", "w2"):
        after = part(view, member)
        assert after["env_steps"] == at[member]["env_steps"], "they had done enough already"
        assert after["updates"] == at[member]["updates"]
    critic = part(view, "w0")
    sent = sum(part(view, member)["updates"] for member in ("w1", "w2"))
    dropped = critic["dropped"]
    assert critic["updates"] >= at["w0"]["updates"]
    assert critic["trajectories"] + dropped.get("oldest", 0) + dropped.get("stale", 0) == sent


def goes_on(client: HubClient, job_id: str, member: str) -> bool:
    """Return whether a process of this member has taken up a saved state."""
    lines = client.logs(job_id, member=member)["lines"]
    return any("continues after" in line["text"] for line in lines)


@pytest.mark.long(
    "tests/rl/critic/test_roles.py::test_non_finite_experience_is_counted_and_isolated"
)
def test_fifth_policy_joins_and_broken_one_is_isolated(atoll: Atoll) -> None:
    hub = hub_with(atoll, slots=4)
    pool = 'record = false\npool = "pool/balance"'
    with hub.client() as client:
        first = client.submit(job("one", name="first", steps=ENDLESS, env=PACED, more=pool))
        until(lambda: last(client, first, "w1", "env_steps") > 500)
        guest = f"{pool}\nhost_critic = false"
        fifth = client.submit(job("five", name="fifth", steps=4096, more=guest))
        broken = client.submit(job("odd", name="broken", env="Nothing-v0", more=guest))
        ended = wait_for(client, broken, "failed")
        assert ended["error"]["what"] == "the environment of policy odd cannot be made"
        assert "Nothing" in ended["error"]["given"]
        view = wait_for(client, fifth, "done")
        assert part(view, "w0")["env_steps"] == 4096
        figure = f"value_loss.{fifth}.five"
        until(lambda: last(client, first, "w0", figure) >= 0)
        assert client.job(first)["state"] == "running"
        client.stop(first, grace_s=PATIENCE_S)
        stopped = wait_for(client, first, "stopped")
    critic, one = part(stopped, "w0"), part(stopped, "w1")
    assert critic["trajectories"] > one["updates"] // 2
