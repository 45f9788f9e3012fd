"""What people see of a job that runs, but not on all its machines."""

from __future__ import annotations

from atoll.config import parse_spec
from atoll.hub.jobs.people import few, starting
from atoll.hub.jobs.record import Job, Member
from atoll.wire.states import JobState, MemberState

TRAINS = "[job]\nnodes = 4\n"
COMMAND = '[job]\ncommand = ["true"]\n'


def job(*states: MemberState, spec: str = TRAINS) -> Job:
    members = {
        f"w{slot}": Member(member=f"w{slot}", slot=slot, node=f"lap{slot + 1}", state=state)
        for slot, state in enumerate(states)
    }
    return Job(job="j", created=0.0, spec=parse_spec(spec), state=JobState.RUNNING, members=members)


def test_starting_job_names_its_machines_and_the_reason() -> None:
    new, coming, up = MemberState.ASSIGNED, MemberState.STARTING, MemberState.RUNNING
    assert starting(job(up, up)) == ""
    loads = "loading torch, the model and the data"
    assert starting(job(up, up, coming)) == f"waiting for lap3 to start: {loads}"
    assert starting(job(coming, coming, coming, coming)) == (
        f"waiting for lap1, lap2 and 2 more to start: {loads}"
    )
    assert starting(job(new, coming)) == (
        "waiting for lap1 to start: its machine has not answered yet; "
        f"waiting for lap2 to start: {loads}"
    )
    assert starting(job(coming, spec=COMMAND)) == "waiting for lap1 to start: starting the command"


def test_code_and_packages_are_told_before_the_program() -> None:
    spec = f'{COMMAND}code = "sha256:{"0" * 64}"\nrequirements = "requirements.txt"\n'
    assert starting(job(MemberState.STARTING, spec=spec)).endswith(
        "fetching its code, installing its packages, starting the command"
    )


def test_of_many_names_the_first_ones_are_told() -> None:
    assert few(["a", "b", "c"]) == "a, b, c"
    assert few(["a", "b", "c", "d"]) == "a, b and 2 more"
