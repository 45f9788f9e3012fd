from __future__ import annotations

import pytest

from atoll.config import parse_spec
from atoll.hub.rounds.save_schedule import FIRST_S, LONGEST_S, REST, SaveSchedule


def test_first_checkpoint_comes_sooner_than_the_others() -> None:
    schedule = SaveSchedule(300.0, now=1000.0)
    assert not schedule.due(1000.0 + FIRST_S - 1)
    assert schedule.due(1000.0 + FIRST_S)
    schedule.requested(1060.0)
    assert not schedule.due(1060.0)
    schedule.completed(1061.0)
    assert not schedule.due(1359.0)
    assert schedule.due(1360.0)


def test_slow_checkpoints_take_at_most_a_tenth_of_the_time() -> None:
    schedule = SaveSchedule(10.0, now=0.0)
    schedule.requested(10.0)
    schedule.completed(30.0)
    assert not schedule.due(30.0 + REST * 20.0 - 1)
    assert schedule.due(30.0 + REST * 20.0)


def test_unfinished_checkpoints_are_asked_for_less_often() -> None:
    schedule, now, gaps = SaveSchedule(600.0, now=0.0), 60.0, []
    for _ in range(5):
        schedule.requested(now)
        began = now
        while not schedule.due(now):
            now += 60.0
        gaps.append(now - began)
    assert gaps == [600.0, 1200.0, 2400.0, LONGEST_S, LONGEST_S]


@pytest.mark.parametrize(
    ("job", "checkpoint", "every_s"),
    [
        ('script = "a.py"', "", 300.0),
        ('script = "a.py"', "every_s = 20", 20.0),
        ('script = "a.py"', "every_s = 0", 0.0),
        ('script = "a.py"', "every = 5", 0.0),
        ('command = ["bash", "a.sh"]', "", 300.0),
        ("", "", 0.0),
    ],
)
def test_scripts_are_asked_by_time_unless_they_count_rounds(
    job: str, checkpoint: str, every_s: float
) -> None:
    spec = parse_spec(f"[job]\n{job}\n[checkpoint]\n{checkpoint}\n")
    assert spec.saves_every_s == every_s
    assert SaveSchedule(every_s, now=0.0).due(1e9) == (every_s > 0)
