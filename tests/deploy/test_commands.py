"""The check that the other tests here rely on can fail."""

from __future__ import annotations

import pytest

from tests.deploy.commands import refusal


@pytest.mark.parametrize(
    "words",
    ["hub", "hub --data /d --runs /r --port 7700", "join @/ticket --slots 2", "run job.toml",
     "hub backup /backups --keep 7", "ticket new --role operator --uses 10"],
)  # fmt: skip
def test_what_atoll_takes(words: str) -> None:
    assert refusal(words.split()) == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("hubb", "no verb 'hubb'"),
        ("hub --dato /d", "--dato"),
        ("hub backup", "folder"),
        ("hub --port x", "for '--port'"),
        ("join a b c", "unexpected extra"),
        ("service install", "missing argument 'hub|node'"),
    ],
)
def test_what_atoll_does_not_take(words: str, told: str) -> None:
    assert told in refusal(words.split()).lower()
