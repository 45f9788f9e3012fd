"""Names for people: machines, with the member where a machine has several."""

from __future__ import annotations

import pytest

from atoll.ids import by_number, machine_names, spoken

NODES = {"w0": "lap1", "w1": "lap2", "w2": "lap2", "w3": ""}


def test_members_are_called_by_their_machines() -> None:
    assert machine_names(NODES) == {
        "w0": "lap1", "w1": "lap2 (w1)", "w2": "lap2 (w2)", "w3": "w3",
    }  # fmt: skip


def test_names_are_sorted_as_people_do() -> None:
    assert sorted(["lap10", "lap9-b", "attic", "lap9", "lap"], key=by_number) == [
        "attic", "lap", "lap9", "lap9-b", "lap10",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("member", "text", "sentence"),
    [
        ("w0", "w0 is silent: round 3 continues without it",
         "lap1 is silent: round 3 continues without it"),
        ("w1", "w1 and w0 differ", "lap2 (w1) and lap1 differ"),
        ("w0", "lap1 caught up (13.0 MB in 0.1 s)", "lap1 caught up (13.0 MB in 0.1 s)"),
        ("w2", "model.safetensors waits for room", "lap2 (w2): model.safetensors waits for room"),
        ("", "checkpoint of round 2 is complete", "checkpoint of round 2 is complete"),
        ("w9", "w9 holds another result", "w9 holds another result"),
    ],
)  # fmt: skip
def test_sentences_name_machines(member: str, text: str, sentence: str) -> None:
    assert spoken(text, NODES, member=member) == sentence
