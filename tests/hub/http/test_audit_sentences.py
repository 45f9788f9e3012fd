"""The audit log in sentences."""

from __future__ import annotations

import pytest

from atoll.hub.http.audit_sentences import audit_sentence


def row(role: str, name: str, action: str, target: str, outcome: str = "200") -> dict[str, str]:
    return {
        "role": role, "name": name, "address": "10.0.0.7", "action": action, "target": target,
        "outcome": outcome,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (row("operator", "operator", "submit", "POST /api/jobs/gpt-1", "201"),
         "operator started gpt-1"),
        (row("operator", "maria", "drain", "POST /api/nodes/lap3/drain"),
         "operator maria drained lap3"),
        (row("node", "lap1", "join", "POST /api/join", "201"), "node lap1 joined the cluster"),
        (row("viewer", "eve", "stop", "POST /api/jobs/gpt-1/stop", "403"),
         "viewer eve tried to stop gpt-1: refused, not allowed"),
        (row("", "", "session", "lap9", "unknown token"),
         "someone at 10.0.0.7 tried to connect as lap9: unknown token"),
    ],
)  # fmt: skip
def test_a_row_of_the_audit_log_is_a_sentence(given: dict[str, str], text: str) -> None:
    assert audit_sentence(given) == text
