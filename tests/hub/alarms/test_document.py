"""docs/operate/alarms.md says what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from atoll.hub.alarms.notify_config import TABLES
from atoll.hub.alarms.watch import RULES
from atoll.hub.rounds.timeline import ROW_FIELDS

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "operate" / "alarms.md").read_text(
    encoding="utf-8"
)


def test_every_kind_is_documented_with_its_times() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \| (\d+) \| .* \| .* \| .* \| .* \|$", TEXT, re.M)
    documented = {kind: (float(holds), float(gone)) for kind, holds, gone in rows}
    assert documented == {rule.kind: (rule.holds_s, rule.gone_s) for rule in RULES}


def test_every_option_of_a_hook_is_documented() -> None:
    options = {field.name for kind in TABLES.values() for field in dataclasses.fields(kind)}
    documented = {name for cell in re.findall(r"^\| (`.*?`) \| \w+ \|", TEXT, re.M)
            for name in re.findall(r"`(\w+)`", cell)}  # fmt: skip
    assert options <= documented


def test_every_figure_of_a_timeline_is_documented() -> None:
    assert " ".join(ROW_FIELDS) in " ".join(TEXT.split())
