"""Checkpoints of a model in stages at a real hub, saved by one member of each stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.checkpoint import BackgroundSaver, HubStore, HubTarget
from atoll.errors import CheckpointMissing
from atoll.hub.server import HubServer
from atoll.strategies.inner.swarm.stage import StageCut
from atoll.swarm.ledger import Ledger
from atoll.train.results.sample import load_model
from atoll.train.swarm.build import JobStages, TrainedStage
from atoll.train.swarm.states import JobStates
from atoll.wire.manifest import MANIFEST_NAME, PIECES_FORMAT, piece_file
from atoll.wire.messages import CheckpointPart, CheckpointState, Failure, SwarmUnsaved
from tests.hub.membership import Running
from tests.hub.swarm.test_swarm_service import TABLES, ledger_of, ready
from tests.patience import PATIENCE_S
from tests.train.swarm.kit import COUNT, assert_same_state, job_of, place, step

LAST = 50
"""Steps of the job at the hub."""


@pytest.fixture
def swarm(hub: HubServer) -> Iterator[Running]:
    """A job of two stages, one for each of its two members."""
    group = Running(hub, more=TABLES)
    yield group
    group.close()


class Site(contextlib.ExitStack):
    """Members of a job with savers of their own, whose stages are at the hub's last step."""

    def __init__(self, swarm: Running, folder: Path) -> None:
        super().__init__()
        self.swarm, self.folder = swarm, folder
        self.spec = job_of(folder)
        self.states = [self.states_of(slot) for slot in range(2)]
        self.stages = [
            JobStages(self.spec, StageCut(stages=2), member=f"w{slot}", states=states)
            for slot, states in enumerate(self.states)
        ]
        self.path = [stages.take(place(n)) for n, stages in enumerate(self.stages)]
        step(self.path, self.stages[0].rows(COUNT), 0)

    def states_of(self, slot: int) -> JobStates:
        swarm, launch = self.swarm, self.swarm.launches[slot]

        def publish(part: CheckpointPart) -> bool:
            answer = swarm.members[slot].request(part)
            assert isinstance(answer, CheckpointState), answer
            return answer.published

        target = HubTarget(url=swarm.hub.url, token=launch.token, job=swarm.job)
        scratch = self.folder / f"w{slot}"
        saver = BackgroundSaver(target, scratch=scratch, publish=publish)
        self.callback(saver.abandon)

        class NoServer:
            me = f"w{slot}"

            def offer(self, state: object, *, still: object) -> None:
                """Serve no member."""

        return JobStates(
            NoServer(), NoServer(),  # type: ignore[arg-type]
            lambda: HubStore.reading(swarm.hub.url, launch.token, swarm.job, scratch=scratch),
            saver,
        )  # fmt: skip

    def save(self, slot: int, *, at: int, history: int = 0) -> None:
        self.path[slot].task.step = at
        failed: list[bool] = []
        self.stages[slot].save(history=history, final=True, failed=lambda: failed.append(True))
        assert self.states[slot].saver.wait(PATIENCE_S)
        assert not failed

    def at_hub(self, name: str) -> Path:
        assert self.swarm.hub.hub is not None
        return self.swarm.hub.hub.stores.jobs.folder(self.swarm.job) / name


@pytest.fixture
def site(swarm: Running, tmp_path: Path) -> Iterator[Site]:
    for peer in swarm.members:
        ready(peer)
    with Site(swarm, tmp_path) as found:
        yield found


def reach(site: Site, step: int) -> Ledger:
    """Let the hub's ledger be at a step whose state is to be saved."""
    ledger = ledger_of(site.swarm)
    ledger.steps.step, ledger.saves.every = step, step
    assert ledger.savers() == ["w0", "w1"]
    return ledger


def test_the_hub_completes_what_all_stages_have_saved(site: Site) -> None:
    ledger = reach(site, 7)
    site.save(0, at=7)
    with pytest.raises(CheckpointMissing), contextlib.closing(site.states[1].store()) as store:
        store.manifest(7)
    assert ledger.saves.saved == 0
    site.save(1, at=7)
    assert ledger.saves.saved == 7
    with contextlib.closing(site.states[1].store()) as store:
        manifest = store.manifest(7)
    assert (manifest.step, manifest.members) == (7, ["stage0", "stage1"])
    assert manifest.versions["format"] == PIECES_FORMAT
    others = [JobStages(site.spec, StageCut(stages=2), member="w1", states=s) for s in site.states]
    for stage, stages in enumerate(others):
        again = stages.take(place(stage, 7))
        assert_same_state(again, _at(site, stage, 7))
    whole = JobStages(site.spec, StageCut(stages=1), member="w1", states=site.states[0])
    assert set(whole.take(place(0, 7)).state().model_tensors()) == {
        name for stage in site.path for name in stage.state().model_tensors()
    }
    assert not site.at_hub("model.safetensors").exists()


def _at(site: Site, stage: int, number: int) -> TrainedStage:
    trained = site.path[stage]
    trained.runner.begin(number)
    if trained.task.scheduler is not None:
        trained.task.scheduler.load_state_dict({"step": number})
    return trained


def test_files_of_two_histories_make_no_checkpoint(site: Site) -> None:
    reach(site, 7)
    site.save(0, at=7, history=3)
    site.save(1, at=7, history=4)
    assert not site.at_hub(f"checkpoints/round-000007/{MANIFEST_NAME}").exists()
    site.save(0, at=7, history=4)
    assert site.at_hub(f"checkpoints/round-000007/{MANIFEST_NAME}").exists()
    saves = ledger_of(site.swarm).saves
    assert (saves.saved, saves.history) == (7, 4)


def test_the_last_checkpoint_becomes_the_jobs_model(site: Site) -> None:
    reach(site, LAST).saves.last = LAST
    for slot in range(2):
        site.save(slot, at=LAST)
    model, tokenizer = load_model(site.at_hub("model.safetensors"))
    state = model.state_dict()
    for stage in site.path:
        for name, parameter in stage.runner.stage.parameters().items():
            assert parameter.equal(state[name]), name
    assert tokenizer.decode(tokenizer.encode(b"12 squared")) == b"12 squared"


def test_a_file_of_no_stage_is_refused(site: Site) -> None:
    answer = site.swarm.members[0].request(CheckpointPart(7, 7, piece_file(2), "0" * 64, 1))
    assert isinstance(answer, Failure)
    assert "not its own" in answer.error["what"]


def test_only_named_savers_save_what_the_ledger_reached(site: Site) -> None:
    reach(site, 7)
    site.swarm.members[0].request(CheckpointPart(7, 7, piece_file(0), "0" * 64, 1))
    for round_, stage in ((-1, 0), (10**12, 0), (8, 0), (7, 1)):
        answer = site.swarm.members[0].request(
            CheckpointPart(round_, round_, piece_file(stage), "0" * 64, 1)
        )
        assert isinstance(answer, Failure)
        assert "not to save" in answer.error["what"], (round_, stage)


def test_a_saver_that_failed_is_replaced_or_given_up(site: Site) -> None:
    ledger = ledger_of(site.swarm)
    ledger.steps.step = ledger.saves.last
    assert ledger.savers() == ["w0", "w1"]
    table = ledger.table
    site.swarm.members[1].request(SwarmUnsaved(ledger.step))
    assert ledger.table > table
    assert ledger.savers() == []
    assert ledger.finished
