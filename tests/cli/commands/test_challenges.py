"""`atoll challenges`: members with strikes and scores, then challenges, newest first."""

from __future__ import annotations

from typing import Any

from atoll.cli.commands.challenges import challenge_lines

FOUND: dict[str, Any] = {
    "members": {
        "w0": {"rounds": 9, "checked": 1, "passed": 1, "alike": 0.312, "rating": 0.2},
        "w1": {"rounds": 4, "checked": 3, "strikes": ["round 1: a", "round 2: b", "round 3: c"],
               "evicted": True, "accused_falsely": 2},
        "w2": {"rounds": 9},
    },
    "open": [{"number": 6, "round": 9, "member": "w2", "why": "newcomer", "stage": "deposit",
              "checker": "", "judge": ""}],
    "settled": [
        {"number": 5, "round": 8, "member": "w0", "why": "chance", "result": "passed",
         "checker": "w2", "own": 0.042},
        {"number": 4, "round": 3, "member": "w1", "why": "strike", "result": "failed",
         "checker": "w0", "judge": "w2", "reason": "c"},
    ],
}  # fmt: skip


def test_members_and_challenges_are_shown() -> None:
    assert challenge_lines(FOUND) == [
        "w0  trusted  1 of 9 rounds checked, 1 passed, 0 strikes, alike 0.31, rating 0.20",
        "w1  evicted  3 of 4 rounds checked, 0 passed, 3 strikes, accused others falsely: 2",
        "    round 1: a",
        "    round 2: b",
        "    round 3: c",
        "w2  not checked  0 of 9 rounds checked, 0 passed, 0 strikes",
        "round 9  w2  waits for deposit",
        "round 8  w0  passed (chance; checker w2): gained 4.2 % on its own data, 0.0 % on held-out"
        " data",
        "round 3  w1  failed (strike; checker w0, judge w2): c",
    ]


def test_older_ones_are_left_out_and_counted() -> None:
    assert challenge_lines(FOUND, limit=1)[-1] == "1 older ones: --all"
    assert challenge_lines({"members": {}, "open": [], "settled": []}) == [
        "no member has been checked yet"
    ]
