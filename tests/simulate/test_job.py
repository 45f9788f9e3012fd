"""A job's method in a simulation: its rounds, bytes and state, beside members that really train."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.config import JobSpec, read_spec
from atoll.errors import ConfigError
from atoll.fleet.fleet import Fleet, Machine, Site
from atoll.forecast.state import newcomer_bytes
from atoll.forecast.workload import TrafficOf, workload_of
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.plan.memory import sizes_of
from atoll.simulate.job import setting_of
from atoll.simulate.schedule import Schedule
from atoll.simulate.world import World, simulate
from atoll.strategies.compatibility import check_job
from atoll.task import Task
from atoll.train.build import whole_model
from atoll.train.optim.optimizers import build_optimizer
from atoll.train.state.committed import CommittedState
from atoll.train.trainer import Trainer
from atoll.wire.messages import Registered
from tests.simulate import fleets
from tests.simulate.fleets import fleet_of
from tests.train.members import train_member

STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        lines = [f"def f{number}_{n}(x):\n    return x * {n} + {number}\n" for n in range(200)]
        (folder / f"{number}.py").write_text("".join(lines), encoding="utf-8")
    return f"files:{folder}/*.py"


def job(corpus: str, strategy: dict[str, Any], **more: Any) -> JobSpec:
    tables: dict[str, dict[str, Any]] = {
        "job": {"nodes": 2, "threads": 0, "route": "relay"},
        "model": {"layers": 1, "width": 16, "heads": 2, "context": 16},
        "data": {"corpus": corpus},
        "train": {"steps": STEPS, "batch": 4, "lr": 0.01, "warmup": 2, "eval_tokens": 512},
        "strategy": strategy,
    }
    for name, table in more.items():
        tables[name] = {**tables.get(name, {}), **table}
    return read_spec(tables)


def really_sent(spec: JobSpec, folder: Path) -> list[int]:
    """Return the bytes that members in threads send in a run, one after the other at the start."""
    lock, prepare, groups = threading.Lock(), Trainer.prepare, MemoryGroups(spec.job.nodes)

    def in_turn(self: Trainer, start: Registered) -> None:
        with lock:  # torch's generator of random numbers is one for all threads
            prepare(self, start)

    def body(group: Group) -> dict[str, Any]:
        (folder / group.me).mkdir(parents=True)
        return train_member(spec, group, folder / group.me)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "prepare", in_turn)
        return [int(result["sent_bytes"]) for result in groups.together(body)]


METHODS: list[dict[str, Any]] = [
    {"preset": "diloco", "codec": "feedback(int8)", "every": 3, "shared_steps": 2},
    {"preset": "local-sgd", "every": 3},
    {"preset": "ddp"},
    {"preset": "streaming-diloco", "every": 6, "fragments": 2, "delay": 2, "shared_steps": 0},
]


@pytest.mark.parametrize("strategy", METHODS, ids=lambda table: str(table["preset"]))
def test_bytes_are_those_of_the_method_and_of_real_members(
    corpus: str, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    spec = job(corpus, strategy)
    setting = setting_of(spec, fleet_of(2))
    outcome = simulate(dataclasses.replace(setting, jitter=0.0))
    traffic = TrafficOf(workload_of(spec))(check_job(spec), peers=2, steps=STEPS)
    assert (outcome.ended, outcome.steps) == ("done", STEPS)
    assert outcome.rounds_committed == traffic.rounds
    assert outcome.member_bytes == pytest.approx(
        2 * traffic.relay_sent_bytes, abs=2 * traffic.rounds
    )
    assert outcome.member_bytes == pytest.approx(
        sum(really_sent(spec, tmp_path)), abs=2 * traffic.rounds
    )
    through = 2 * (traffic.relay_sent_bytes + traffic.relay_received_bytes)
    assert outcome.relay_bytes == pytest.approx(through, rel=0.05, abs=3e4)  # and messages


LONG_BEGINNINGS: list[dict[str, Any]] = [
    {"preset": "streaming-diloco", "every": 100, "fragments": 2, "shared_steps": 1200},
    {"preset": "one-bit-adam", "warmup_steps": 1200},
]


@pytest.mark.parametrize("strategy", LONG_BEGINNINGS, ids=lambda table: str(table["preset"]))
def test_a_long_beginning_does_not_count_as_usual(corpus: str, strategy: dict[str, Any]) -> None:
    steps = 20_000
    spec = job(corpus, strategy, train={"steps": steps, "batch": 16})
    setting = setting_of(spec, fleet_of(2))
    traffic = TrafficOf(workload_of(spec))(check_job(spec), peers=2, steps=steps)
    sent = sum(setting.moved(round_, 2).relay_sent for round_ in range(traffic.rounds))
    assert sent == pytest.approx(traffic.relay_sent_bytes, rel=0.05)


def test_bytes_between_members_of_a_site_are_those_of_the_method(corpus: str) -> None:
    spec = job(corpus, METHODS[0], job={"nodes": 3, "route": "direct"})
    fleet = fleet_of(3, site="lab")
    setting = setting_of(spec, dataclasses.replace(fleet, sites=(Site(name="lab", mbps=100),)))
    outcome = simulate(dataclasses.replace(setting, jitter=0.0))
    traffic = TrafficOf(workload_of(spec))(check_job(spec), peers=3, steps=STEPS)
    assert {row["route"] for row in outcome.timeline} == {"direct"}
    assert outcome.member_bytes == pytest.approx(
        3 * traffic.direct_sent_bytes, abs=3 * traffic.rounds
    )


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_newcomer_takes_over_what_a_donor_serves(corpus: str, optimizer: str) -> None:
    spec = job(corpus, METHODS[0], train={"optimizer": optimizer})
    workload, resolved = workload_of(spec), check_job(spec)
    model: Any = whole_model(spec, sizes_of(spec))
    made = build_optimizer(model, spec.train)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    outer, task = resolved.build(), Task(model, made, member="w0", last=STEPS)
    outer.setup(task, group=SingleGroup(), codec=make_codec(resolved.codec))
    parts = CommittedState(task, outer).parts()
    served = sum(tensor.nbytes for part in parts for tensor in part.tensors.values())
    assert newcomer_bytes(spec, workload, resolved) == served


def test_places_pace_and_speed_are_the_jobs_own(corpus: str) -> None:
    spec = job(
        corpus, METHODS[3], job={"nodes": {"min": 2, "max": 5}, "quorum": 0.8, "seed": 11},
        train={"pace": "equal"},
    )  # fmt: skip
    machines = tuple(
        Machine(name=f"m{n}", gflops=1.0 + n, up_mbps=10, down_mbps=10) for n in range(7)
    )
    setting = setting_of(spec, Fleet(machines=machines))
    assert (setting.wanted, setting.min_members, setting.quorum, setting.seed) == (5, 2, 0.8, 11)
    schedule = setting.schedule
    assert (schedule.every, schedule.hidden, schedule.paced, schedule.steps) == (3, 2, False, 12)
    slow, fast = setting.fleet.machines[0].step_s, setting.fleet.machines[1].step_s
    assert slow == pytest.approx(2 * fast)
    assert slow == pytest.approx(workload_of(spec).step_on(machines[0]).seconds)
    assert any("estimated from gflops" in note for note in setting.notes)


def test_what_a_method_hides_behind_training_costs_no_time() -> None:
    found = {}
    for hidden in (0, 20):
        setting = fleets.setting_of(
            fleet_of(4, up_mbps=10.0, down_mbps=40.0), route="relay", start_s=0.0,
            method=Schedule(every=100, hidden=hidden),
        )  # fmt: skip
        world = World(setting)
        found[hidden] = world.run()
    # A round takes 10 s beside a period of 100 s, of which 20 s go on meanwhile.
    assert found[0].goodput == pytest.approx(100 / 110, abs=0.01)
    assert found[20].goodput > 0.985
    assert found[20].shares["communicating"] < 0.01


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"job": {"script": "train.py"}}, "kind script"),
    ({"strategy": {"preset": "noloco", "every": 3}}, "in pairs"),
    ({"strategy": {"preset": "async-diloco", "every": 3}}, "parameter servers"),
    ({"strategy": {"preset": "alone"}}, "never meet"),
    ({"strategy": {"preset": "diloco", "every": "auto"}}, "every is open"),
    ({"job": {"route": "direct"}}, "route = direct"),
]


@pytest.mark.parametrize(("tables", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_simulated_is_refused_in_words(
    corpus: str, tables: dict[str, Any], words: str
) -> None:
    strategy = tables.get("strategy", METHODS[1])
    spec = job(corpus, strategy, **{k: v for k, v in tables.items() if k != "strategy"})
    with pytest.raises(ConfigError, match=words):
        setting_of(spec, fleet_of(3))


def test_models_in_parts_are_refused_in_words() -> None:
    swarm = read_spec({"job": {"nodes": 4}, "swarm": {"stages": 2}, "strategy": {"inner": "swarm"}})
    with pytest.raises(ConfigError, match="passes between stages"):
        setting_of(swarm, fleet_of(4))
    paths = read_spec({"job": {"nodes": 4}, "strategy": {"preset": "dipaco"}})
    with pytest.raises(ConfigError, match="a group for each module"):
        setting_of(paths, fleet_of(4))
