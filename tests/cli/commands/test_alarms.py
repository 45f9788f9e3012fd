"""How alarms and worth are said on a terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from atoll.cli.commands.alarms import alarms_table, worth_lines


def row(**changes: Any) -> dict[str, Any]:
    return {
        "id": 12, "kind": "straggler", "severity": "warning", "job": "j", "node": "lap3",
        "member": "w2", "cause": "w2 on lap3 is slow [really]", "remedy": "atoll drain lap3",
        "since": 1_000_000.0, "ended": None, "value": 0.5, "silenced": False,
    } | changes  # fmt: skip


def shown(*rows: dict[str, Any]) -> str:
    table = alarms_table(rows)
    assert isinstance(table, Text)
    return table.plain


def test_an_alarm_is_said_with_its_number_cause_and_remedy() -> None:
    lines = shown(row()).splitlines()
    assert lines[0].startswith("  12  straggler  warning  since ")
    assert lines[1:] == ["      w2 on lap3 is slow [really]", "      atoll drain lap3"]


def test_ended_alarm_has_no_remedy_and_silence_is_shown() -> None:
    over = shown(row(ended=1_000_100.0))
    assert "ended" in over
    assert "atoll drain" not in over
    assert "warning, silenced" in shown(row(silenced=True))


def test_node_value_is_shown_in_sentences_once_known() -> None:
    text = "too early to say: 2 of 5 rounds"
    early: dict[str, Any] = {"text": text, "tokens_per_s": None, "nodes": [], "next": {}}
    assert worth_lines(early) == ["too early to say: 2 of 5 rounds"]
    said: dict[str, Any] = {
        "text": "2 machines: 100 tokens/s; remove lap2: ...", "tokens_per_s": 100.0,
        "nodes": [{"text": "keep lap1: it adds 60"}, {"text": "remove lap2: ..."}],
        "next": {"text": "a 3rd node would add about 30 %"},
    }  # fmt: skip
    assert worth_lines(said) == [
        "2 machines: 100 tokens/s", "  keep lap1: it adds 60", "  remove lap2: ...",
        "  a 3rd node would add about 30 %",
    ]  # fmt: skip
