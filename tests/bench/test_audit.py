"""The simulation of verified rounds: every cheat is found, nobody honest is struck."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.verification.record import STRIKES
from bench.audit.__main__ import row
from bench.audit.members import CHEATS, cheats_of, names
from bench.audit.simulation import MEMBERS, Simulation, job

ROUNDS = 14


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    with Simulation(job(every=2, rounds=ROUNDS, width=16, batch=2)) as made:
        yield made


@pytest.mark.parametrize("kind", [*CHEATS, "silent", "accuse"])
@pytest.mark.every(4)
def test_every_cheat_is_found_and_evicted(simulation: Simulation, kind: str) -> None:
    cheats = cheats_of(kind, 2, of=names(MEMBERS), seed=1)
    found = simulation.run(ROUNDS, cheats=cheats, share=0.02, seed=1)
    shown = row(kind, 1, found)
    assert (shown["found"], shown["evicted"], shown["false"]) == (2, 2, 0)
    assert {name: len(rounds) for name, rounds in found.struck.items()} == dict.fromkeys(
        cheats, STRIKES
    )


def test_honest_members_pass_every_check(simulation: Simulation) -> None:
    found = simulation.run(4, share=1.0, seed=2)
    assert found.checked == found.member_rounds == 4 * MEMBERS
    assert (found.struck, found.notices) == ({}, [])


def test_lying_checkers_are_evicted_and_nobody_else(simulation: Simulation) -> None:
    cheats = cheats_of("accuse", 2, of=names(MEMBERS), seed=1)
    found = simulation.run(ROUNDS, cheats=cheats, share=0.02, seed=1)
    assert set(found.struck) == set(found.evicted) == set(cheats)
    strikes = [notice.text for notice in found.notices if notice.kind == "strike"]
    assert any("it accused w" in text and "falsely" in text for text in strikes)
    assert all("it accused w" in text or "as a judge of w" in text for text in strikes)
