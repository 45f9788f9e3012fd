"""The table of quotas: names, sizes, and who may set which."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.clock import VirtualClock
from atoll.errors import ConfigError
from atoll.hub.quotas.ledger import Holder, Ledger
from atoll.hub.quotas.limits import DEFAULT_QUOTAS, Kind, Quotas, parse_quotas, read_quotas


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "quotas.toml"
    assert read_quotas(path) == DEFAULT_QUOTAS
    path.write_text('job_disk = "500GB"\nblobs = 7\nqueue = 0\n')
    found = read_quotas(path)
    assert (found.job_disk, found.blobs, found.queue) == (500 * 10**9, 7, 0)
    assert found.connections == DEFAULT_QUOTAS.connections


def test_every_kind_has_a_limit_and_a_text() -> None:
    for kind in Kind:
        assert DEFAULT_QUOTAS.of(kind) > 0
        assert kind.text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("job_disc = 1", "did you mean 'job_disk'"),
        ("job_disk = -1", "job_disk is not a limit"),
        ('job_disk = "much"', "cannot be read"),
        ("blobs = true", "blobs is not a limit"),
        ('blobs = "3GB"', "blobs is not a limit"),
        ("blobs = ", "the quotas cannot be read"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "quotas.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_quotas(path)


def test_a_file_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the quotas cannot be read"):
        read_quotas(tmp_path / "none.toml", needed=True)


def test_a_ticket_sets_limits_of_tokens_only() -> None:
    assert parse_quotas(["disk=10GB", "connections=20"]) == {"disk": 10**10, "connections": 20}
    with pytest.raises(ConfigError, match="unknown quota"):
        parse_quotas(["reducer_job=1GB"])
    with pytest.raises(ConfigError, match="not a quota"):
        parse_quotas(["disk"])
    with pytest.raises(ConfigError, match="not a limit"):
        parse_quotas(["connections=\u00b2"])  # a superscript two


def test_limits_of_a_login_hold_for_its_jobs() -> None:
    ledger = Ledger(Quotas(job_disk=100, connections=9), clock=VirtualClock())
    ledger.overrides = lambda role, name: (
        {"job_disk": 5, "connections": 2} if (role, name) == ("operator", "anna") else {}
    )
    ledger.submitter = lambda job: ("operator", "anna") if job == "hers" else ("", "")
    assert ledger.limit(Kind.JOB_DISK, Holder("job", "hers")) == 5
    assert ledger.limit(Kind.JOB_DISK, Holder("job", "other")) == 100
    assert ledger.limit(Kind.CONNECTIONS, Holder("operator", "anna")) == 2
    assert ledger.limit(Kind.CONNECTIONS, Holder("job", "hers", "w0")) == 9


def test_a_refusal_names_who_how_much_and_what_to_do() -> None:
    ledger = Ledger(Quotas(blobs=3), clock=VirtualClock())
    error = ledger.refuse(Kind.BLOBS, Holder("node", "lap1"), used=3, wanted=1, remedy="tidy up")
    text = str(error)
    for part in ("node lap1", "3 in use", "1 more", "at most 3", "quotas.toml", "tidy up"):
        assert part in text
