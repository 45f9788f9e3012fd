"""Job records and their events: durable, checked, and the same after a restart."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from atoll.config import JobSpec, parse_spec
from atoll.errors import ConfigError, HubError
from atoll.hub.http.views import job_view
from atoll.hub.jobs import jobs as jobs_module
from atoll.hub.jobs.record import job_facts
from atoll.hub.observability.events import MAX_EVENTS
from atoll.hub.stores import Stores
from atoll.wire.states import JobState
from tests.hub.durable import SPEC, with_stores


def test_submitted_job_has_folder_spec_and_files(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        job = await stores.jobs.create(SPEC, files={"train.py": "print(1)\n"})
        assert (job.state, job.nodes_wanted, job.spec.train.steps) == ("waiting", 2, 100)
        folder = stores.jobs.folder(job.job)
        resolved = parse_spec((folder / "job.toml").read_text())
        assert resolved == parse_spec(SPEC)
        assert (folder / "train.py").read_text() == "print(1)\n"
        assert await stores.jobs.files_of(job.job) == {"train.py": "print(1)\n"}

    with_stores(tmp_path, test)


def test_two_jobs_of_one_moment_get_two_names(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        jobs = [await stores.jobs.create(SPEC, files={}) for _ in range(3)]
        assert len({job.job for job in jobs}) == 3
        assert [job.job for job in stores.jobs.list()] == [job.job for job in reversed(jobs)]

    with_stores(tmp_path, test)


def test_a_change_that_is_not_stored_has_not_happened(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        job = await stores.jobs.create(SPEC, files={})
        before = msgspec.structs.astuple(job)
        await stores.database.write(lambda c: c.execute("ALTER TABLE jobs RENAME TO away"))
        with pytest.raises(Exception, match="jobs"):
            await stores.jobs.set_state(job.job, JobState.RUNNING)
        with pytest.raises(Exception, match="jobs"):
            await stores.jobs.update(job.job, paused="by hand", committed_round=3)
        with pytest.raises(Exception, match="jobs"):
            await stores.jobs.scale(job.job, least=1, most=9, data_slots=4)
        with pytest.raises(Exception, match="jobs"):
            await stores.jobs.replace_spec(job.job, SPEC.replace("nodes = 2", "nodes = 7"))
        assert msgspec.structs.astuple(job) == before
        await stores.database.write(lambda c: c.execute("ALTER TABLE away RENAME TO jobs"))
        await stores.jobs.set_state(job.job, JobState.RUNNING)
        assert job.started is not None
        assert job.trains_since == job.started

    with_stores(tmp_path, test)


def test_everything_is_the_same_after_a_restart(tmp_path: Path) -> None:
    before: dict[str, object] = {}

    async def first(stores: Stores) -> None:
        name = (await stores.jobs.create(SPEC, files={"a.py": ""})).job
        await stores.jobs.members.assign(name, member="w0", slot=0, node="n0")
        await stores.jobs.set_state(name, JobState.RUNNING)
        await stores.jobs.members.connected(name, "w0", incarnation="i")
        await stores.jobs.members.update(name, "w0", tail=["x"])
        await stores.jobs.update(name, committed_round=3, resume_round=2, stopping=True)
        await stores.jobs.members.finished(name, "w0", ok=True, result={"loss": 1.5}, error=None)
        before["job"] = stores.jobs.get(name)

    async def second(stores: Stores) -> None:
        assert stores.jobs.list() == [before["job"]]

    with_stores(tmp_path, first)
    with_stores(tmp_path, second)


def test_record_can_join_the_transaction_of_a_verdict(tmp_path: Path) -> None:
    async def first(stores: Stores) -> None:
        job = await stores.jobs.create(SPEC, files={})
        job.committed_round = 7
        await stores.database.write(stores.jobs.storing(job.job))

    async def second(stores: Stores) -> None:
        assert stores.jobs.list()[0].committed_round == 7

    with_stores(tmp_path, first)
    with_stores(tmp_path, second)


def test_a_member_placed_again_counts_its_attempts(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        name = (await stores.jobs.create(SPEC, files={})).job
        await stores.jobs.members.assign(name, member="w0", slot=0, node="n0")
        await stores.jobs.members.update(name, "w0", exit_code=9)
        await stores.jobs.members.lost(name, "w0", why="its node is gone")
        again = await stores.jobs.members.assign(name, member="w0", slot=0, node="n1")
        assert (again.attempt, again.node, again.state, again.exit_code) == (
            2, "n1", "assigned", None,
        )  # fmt: skip

    with_stores(tmp_path, test)


def test_times_follow_the_states(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        job = await stores.jobs.create(SPEC, files={})
        await stores.jobs.set_state(job.job, JobState.RUNNING)
        assert job.started is not None
        await stores.jobs.set_state(
            job.job, JobState.FAILED, reason="w0 failed", error={"what": "x"}
        )
        failed = stores.jobs.get(job.job)
        assert failed.over
        assert failed.ended is not None
        waiting = await stores.jobs.set_state(job.job, JobState.WAITING, reason="resumed")
        assert (waiting.ended, waiting.error, waiting.over) == (None, None, False)

    with_stores(tmp_path, test)


@pytest.mark.parametrize(
    "name",
    ["../x.py", "a/b.py", "/etc/passwd", ".hidden", "job.toml", "Job.TOML", "metrics.jsonl", "",
     "a\0"],
)  # fmt: skip
def test_files_that_would_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    async def test(stores: Stores) -> None:
        with pytest.raises(ConfigError, match="cannot be sent"):
            await stores.jobs.create(SPEC, files={name: "x"})
        assert stores.jobs.list() == []

    with_stores(tmp_path, test)


def test_wrong_specs_names_and_fields_are_refused(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        with pytest.raises(ConfigError, match="did you mean 'steps'"):
            await stores.jobs.create("[train]\nstep = 1\n", files={})
        with pytest.raises(ConfigError, match="too many files"):
            await stores.jobs.create(SPEC, files={f"f{n}": "" for n in range(65)})
        with pytest.raises(HubError, match=r"no such job.*atoll status"):
            stores.jobs.get("nope")
        job = await stores.jobs.create(SPEC, files={})
        with pytest.raises(HubError, match="no such member"):
            await stores.jobs.members.update(job.job, "w9", leaving=True)
        with pytest.raises(ValueError, match="not a valid JobState"):
            JobState("runing")
        with pytest.raises(ConfigError, match="did you mean 'reason'"):
            await stores.jobs.update(job.job, reasn="x")

    with_stores(tmp_path, test)


def test_a_huge_result_is_left_out_by_name(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        name = (await stores.jobs.create(SPEC, files={})).job
        await stores.jobs.members.assign(name, member="w0", slot=0, node="n")
        await stores.jobs.members.finished(
            name, "w0", ok=True, result={"x": "y" * 300_000}, error=None
        )
        assert "left_out" in (stores.jobs.get(name).members["w0"].result or {})

    with_stores(tmp_path, test)


def test_events_are_told_in_order_to_the_database_and_the_file(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        name = (await stores.jobs.create(SPEC, files={})).job
        await stores.events.add(name, "member-lost", "w1 is gone", member="w1", fields={"a": "b"})
        events = await stores.events.read(name)
        assert [event["kind"] for event in events] == ["submitted", "member-lost"]
        assert events[1]["fields"] == {"a": "b"}
        assert await stores.events.read(name, after=events[0]["id"]) == events[1:]
        lines = (stores.jobs.folder(name) / "events.jsonl").read_text().splitlines()
        assert [{**json.loads(line), "job": name} for line in lines] == events

    with_stores(tmp_path, test)


def test_old_events_go_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.observability.events.MAX_EVENTS", 50)
    assert MAX_EVENTS > 50

    async def test(stores: Stores) -> None:
        for number in range(200):
            await stores.events.add("", "node-joined", str(number))
        events = await stores.events.read("")
        assert [event["text"] for event in events] == [str(n) for n in range(150, 200)]

    with_stores(tmp_path, test)


def test_submission_that_is_sent_again_makes_one_job(tmp_path: Path) -> None:
    async def first(stores: Stores) -> None:
        made = await asyncio.gather(
            *(stores.jobs.create(SPEC, files={}, batch="four", key="k1") for _ in range(3))
        )
        assert len({job.job for job in made}) == 1
        assert made[0].batch == "four"
        await stores.jobs.create(SPEC, files={}, key="k2")

    async def second(stores: Stores) -> None:
        assert len(stores.jobs.list()) == 2
        await stores.jobs.create(SPEC, files={}, key="k1")
        assert len(stores.jobs.list()) == 2
        with pytest.raises(ConfigError, match="belongs to another submission"):
            await stores.jobs.create('[job]\nname = "other"\n', files={}, key="k1")
        with pytest.raises(ConfigError, match="cannot be a label"):
            await stores.jobs.create(SPEC, files={}, batch="a\nb")

    with_stores(tmp_path, first)
    with_stores(tmp_path, second)


def test_code_of_a_job_is_held_from_the_moment_it_is_stored(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        content = b"packed"
        name = hashlib.sha256(content).hexdigest()
        spec = f'[job]\ncode = "sha256:{name}"\n'
        with pytest.raises(HubError, match="does not have this blob"):
            await stores.jobs.create(spec, files={})
        assert stores.jobs.list() == []

        async def chunks() -> AsyncIterator[bytes]:
            yield content

        await stores.blobs.put(name, chunks(), max_bytes=100)
        job = await stores.jobs.create(spec, files={})
        held = await stores.database.read(
            lambda connection: connection.execute("SELECT * FROM blob_holds").fetchall()
        )
        assert held == [(f"job/{job.job}", name)]
        with pytest.raises(ConfigError, match="packs and sends the folder"):
            await stores.jobs.create('[job]\ncode = "src"\n', files={})

    with_stores(tmp_path, test)


def test_scaled_job_changes_record_and_file(tmp_path: Path) -> None:
    async def first(stores: Stores) -> None:
        job = (await stores.jobs.create(SPEC, files={})).job
        await stores.jobs.scale(job, least=1, most=5, data_slots=2)

    async def second(stores: Stores) -> None:
        (job,) = stores.jobs.list()
        assert (job.min_nodes, job.nodes_wanted, job.slots) == (1, 5, 2)
        assert parse_spec(job.text) == job.spec
        assert parse_spec((stores.jobs.folder(job.job) / "job.toml").read_text()).job.min_nodes == 1
        again = await stores.jobs.replace_spec(job.job, job.text.replace("nodes = 5", "nodes = 3"))
        assert again.slots == 3  # resumed with other nodes the data is sharded anew

    with_stores(tmp_path, first)
    with_stores(tmp_path, second)


def test_job_file_is_parsed_once_at_submission_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def counted(text: str) -> JobSpec:
        parsed.append(text)
        return parse_spec(text)

    monkeypatch.setattr(jobs_module, "parse_spec", counted)

    async def first(stores: Stores) -> None:
        job = await stores.jobs.create(SPEC, files={})
        assert job.spec is stores.jobs.get(job.job).spec
        assert (job.kind, job.nodes_wanted, job.machines, job.aside) == (
            "trainer",
            2,
            1,
            frozenset(),
        )
        job_view(job, latest={}, live={})
        job_facts(job)

    async def second(stores: Stores) -> None:
        (job,) = stores.jobs.list()
        assert job.spec == parse_spec(SPEC)

    with_stores(tmp_path, first)
    assert len(parsed) == 1
    with_stores(tmp_path, second)
    assert len(parsed) == 2


def test_unreadable_stored_job_file_fails_only_its_job(tmp_path: Path) -> None:
    async def first(stores: Stores) -> None:
        for _ in range(2):
            await stores.jobs.create(SPEC, files={})
        await stores.database.write(
            lambda connection: connection.execute(
                "UPDATE jobs SET spec = '[job]\nnods = 2' WHERE job LIKE '%-2'"
            )
        )

    async def second(stores: Stores) -> None:
        good, bad = sorted(stores.jobs.list(), key=lambda job: job.job)
        assert (good.state, good.nodes_wanted) == ("waiting", 2)
        assert (bad.state, bad.reason) == ("failed", "its job file cannot be read")
        assert bad.error is not None
        assert "nodes" in str(bad.error)  # the nearest key

    with_stores(tmp_path, first)
    with_stores(tmp_path, second)
