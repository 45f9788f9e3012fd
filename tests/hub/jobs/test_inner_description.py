"""What is said of how each member computes: one line, for pages and tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.config import parse_spec
from atoll.hub.jobs.descriptions import describe_inner, describe_island
from atoll.hub.jobs.record import job_facts
from atoll.wire.states import JobState
from tests.hub.durable import with_stores

HEAD = '[job]\nname = "x"\n'


@pytest.mark.parametrize(
    ("tables", "island", "inner"),
    [
        ("", "", ""),
        ('[train]\nprecision = "bf16"\n', "", "local, bf16"),
        (
            '[train]\nprecision = "bf16"\nrecompute = "full"\n'
            '[strategy]\ninner = "fsdp"\n[island]\nranks = 4\nmachines = 2\nencryption = "off"\n',
            "shard=4 on 2 machines", "fsdp, 4 ranks, bf16, recompute full",
        ),
        (
            '[strategy]\ninner = "hybrid"\n[island]\nmesh = { replicate = 2, tensor = 2 }\n',
            "replicate=2 tensor=2", "hybrid, 4 ranks",
        ),
    ],
)  # fmt: skip
def test_a_line_says_how_each_member_computes(tables: str, island: str, inner: str) -> None:
    spec = parse_spec(HEAD + tables)
    assert (describe_island(spec), describe_inner(spec)) == (island, inner)


def test_programs_of_ones_own_have_their_own_precision() -> None:
    assert describe_inner(parse_spec(HEAD + 'command = ["true"]\n')) == ""
    script = parse_spec(HEAD + 'script = "a.py"\n[island]\nranks = 2\n')
    assert describe_inner(script) == "2 ranks"


def test_it_follows_the_job_file(tmp_path: Path) -> None:
    async def test(stores: object) -> None:
        jobs = stores.jobs  # type: ignore[attr-defined]
        job = await jobs.create(HEAD + '[train]\nprecision = "bf16"\n', files={})
        assert job_facts(job)["inner"] == "local, bf16"
        await jobs.set_state(job.job, JobState.STOPPED)
        job = await jobs.replace_spec(job.job, HEAD + '[train]\nrecompute = "full"\n')
        assert job_facts(job)["inner"] == "local, recompute full"

    with_stores(tmp_path, test)
