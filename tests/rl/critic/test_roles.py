from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.errors import ConfigError, DataError
from atoll.group.in_process.groups import MemoryGroups
from atoll.rl.actor import actor as actor_role
from atoll.rl.channel import actor as actor_side
from atoll.rl.critic.service import ServiceValues
from tests.patience import PATIENCE_S
from tests.rl.channel.kit import hurry, until
from tests.rl.critic.role_kit import Members, spec_of

TWO = ({"name": "one"}, {"name": "two"})
WORLDS = "tests.rl.worlds:Counter"


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    # Leases outlive any stall: what a live critic holds is not to come a second time. What is
    # claimed by a thread that ends comes back in time.
    hurry(monkeypatch, lease_s=PATIENCE_S / 3)


def test_two_policies_and_their_critic_come_to_results(tmp_path: Path) -> None:
    critic, one, two = Members(spec_of(*TWO), tmp_path).together()
    for actor, name in ((one, "one"), (two, "two")):
        assert actor["role"] == "actor"
        assert (actor["policy"], actor["env"]) == (name, "CartPole-v1")
        assert (actor["env_steps"], actor["updates"], actor["dropped"]) == (512, 8, {})
        assert actor["episodes"] > 5
        assert actor["return_first"] > 0
        assert actor["sent_bytes"] > 512 * 16
    assert critic["role"] == "critic"
    assert critic["trajectories"] == 16
    assert sum(critic["staleness"].values()) == 16
    assert 0 < critic["updates"] <= 16
    saved = {path.name for path in tmp_path.iterdir()}
    assert saved >= {"policy-one.safetensors", "policy-two.safetensors", "critic.safetensors"}


@pytest.mark.parametrize(
    "rl",
    [
        {"critic": "own"}, {"critic": "unconditioned"}, {"critic": "corrected"},
        {"values": "service"}, {"algorithm": "impala"}, {"algorithm": "impala", "critic": "own"},
        {"algorithm": "a3c", "critic": "own"}, {"recurrent": 4},
    ],
    ids=lambda rl: "-".join(map(str, rl.values())),
)  # fmt: skip
@pytest.mark.every(3)
def test_every_algorithm_with_every_source_of_values(rl: dict[str, Any], tmp_path: Path) -> None:
    tables = {"strategy": {"preset": "alone"}}
    spec = spec_of(*TWO, tables=tables, **{"steps": 256, **rl})
    results = Members(spec, tmp_path).together()
    actors = results[1:] if spec.rl.has_critic else results
    assert [actor["policy"] for actor in actors] == ["one", "two"]
    assert all(actor["env_steps"] == 256 and not actor["dropped"] for actor in actors)
    if spec.rl.algorithm == "impala":
        assert results[0]["role"] == "learner"
        assert results[0]["trajectories"] == 8
        assert load_file(tmp_path / "learner.safetensors")
    else:
        assert all(actor["updates"] == 4 for actor in actors)


def test_actors_of_one_policy_share_its_steps(tmp_path: Path) -> None:
    spec = spec_of({"name": "one", "actors": 2}, algorithm="impala", steps=256)
    learner, first, second = Members(spec, tmp_path).together()
    assert first["env_steps"] == second["env_steps"] == 128
    assert learner["trajectories"] == 4


def test_joint_agents_share_a_policy_and_a_critic(tmp_path: Path) -> None:
    world = {"env": "tests.rl.worlds:pair", "options": {"own_state": True}}
    spec = spec_of({"name": "one", **world}, critic="joint", steps=512)
    critic, actor = Members(spec, tmp_path).together()
    assert actor["env_steps"] == 512  # two agents of two copies: four columns
    assert actor["updates"] == critic["trajectories"] == 4
    with pytest.raises(ConfigError, match="environments with several agents"):
        Members(spec_of(critic="joint"), tmp_path).start(1).result()


def test_policies_of_one_task_agree_by_an_outer_strategy(tmp_path: Path) -> None:
    tables = {"strategy": {"preset": "diloco", "every": 4, "codec": "fp32"}}
    spec = spec_of(*TWO, tables=tables, steps=256)
    groups = MemoryGroups(2, ids=["w1", "w2"])
    members = Members(spec, tmp_path, groups=lambda slot: groups[slot - 1] if slot else lone())
    results = members.together()
    assert all(actor["env_steps"] == 256 for actor in results[1:])
    one, two = (load_file(tmp_path / f"policy-{name}.safetensors") for name in ("one", "two"))
    weights = [name for name in one if not name.startswith("norm.")]
    assert weights
    assert all(torch.equal(one[name], two[name]) for name in weights)
    assert not torch.equal(one["norm.mean"], two["norm.mean"])  # each counts for itself


def lone() -> Any:
    from atoll.group.single import SingleGroup

    return SingleGroup(me="w0")


def test_an_actor_that_was_stopped_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    spec = spec_of(critic="own", steps=1024)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = Members(spec, whole).start(0).result()
    members = Members(spec, parts)
    first = members.start(0)
    while not states(members):  # it has saved something, and is asked to leave at any moment
        time.sleep(0.005)
    first.stop()
    before = first.result()
    after = members.start(0).result()
    assert before["env_steps"] <= after["env_steps"] == 1024
    assert {**after, "queue_wait_s": 0} == {**expected, "queue_wait_s": 0}
    one, two = (load_file(folder / "policy-one.safetensors") for folder in (whole, parts))
    assert all(torch.equal(one[name], two[name]) for name in one)


def states(members: Members) -> int:
    queues = members.run(9)._queues
    return len(queues.topic("state.w0").subscribe("test", start="oldest").read(10))


def test_non_finite_experience_is_counted_and_isolated(tmp_path: Path) -> None:
    spec = spec_of(
        {"name": "good", "env": WORLDS},
        {"name": "odd", "env": WORLDS, "options": {"length": 100, "bad_reward": 90}},
        {"name": "broken", "env": WORLDS, "options": {"bad_reward": 1}, "steps": 2048},
    )
    members = Members(spec, tmp_path)
    critic, good, odd, broken = (members.start(slot) for slot in range(4))
    assert good.result()["dropped"] == {}
    result = odd.result()
    assert result["dropped"]["not_finite"] >= 1
    assert result["updates"] > 0
    with pytest.raises(DataError, match=r"rewards are not finite.*policy broken, actor w3"):
        broken.result()
    critic.stop()  # as the hub does when no other member is left
    sent = good.result()["updates"] + result["updates"]
    learned, unread = int(critic.result()["trajectories"]), list[Any]()

    def all_there() -> bool:
        for slot in (1, 2):  # what it was stopped before waits for the next critic
            unread.extend(members.run(9).queue(f"experience.w{slot}").claim(100))
        return learned + len(unread) >= int(sent)

    until(all_there)
    assert learned + len(unread) == sent


def test_policy_survives_a_change_of_critic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, send = threading.Event(), actor_side.ActorChannel.send

    def unfinished(side: actor_side.ActorChannel, item: Any) -> None:
        if side.sequence == 90:  # of 94: the last ones are for the next critic
            assert changed.wait(PATIENCE_S)
        send(side, item)

    monkeypatch.setattr(actor_side.ActorChannel, "send", unfinished)
    members = Members(spec_of(steps=6_016, queue_items=4), tmp_path)
    critic, actor = members.start(0), members.start(1)
    while not states(members):
        time.sleep(0.005)
    critic.stop()
    before = critic.result()
    changed.set()
    after, result = members.start(0).result(), actor.result()
    assert result["env_steps"] == 6_016
    assert before["updates"] < after["updates"]
    lost = after["dropped"].get("oldest", 0)
    assert after["trajectories"] + lost + after["dropped"].get("stale", 0) == result["updates"]


def test_actor_begins_without_a_silent_critic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_role, "START_S", 0.1)
    monkeypatch.setattr(actor_side, "AWAY_S", 0.0)
    result = Members(spec_of(steps=256), tmp_path).start(1).result()
    assert (result["env_steps"], result["updates"]) == (256, 4)


def test_values_that_do_not_arrive_are_counted_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = functools.partial(ServiceValues, timeout_s=0.1)
    monkeypatch.setattr(actor_role, "ServiceValues", impatient)
    result = Members(spec_of(steps=256, values="service"), tmp_path).start(1).result()
    assert (result["env_steps"], result["updates"]) == (256, 0)
    assert result["dropped"] == {"unanswered": 4}
