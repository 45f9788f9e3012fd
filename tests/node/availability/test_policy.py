"""What an owner writes down, and what the hub receives of it."""

from __future__ import annotations

import dataclasses
import datetime
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.errors import ConfigError
from atoll.node.availability.policy import OwnerPolicy, OwnerPolicyFile, read_policy
from atoll.node.availability.quiet_hours import parse_quiet_hours
from atoll.node.identity.image_signatures import public_text
from atoll.wire.session_messages import KINDS

KEY = public_text(Ed25519PrivateKey.generate())

WHOLE = """
cores = 4
memory_gb = 8
disk_gb = 20.5
upload_mbps = 20
download_mbps = 50
nice = 10
kinds = ["trainer", "signed"]
labels = "home"
mounts = ["/data"]
trusted_keys = ["KEY"]
quiet_hours = ["22:00-07:00", "sat,sun 10:00-18:00"]
pause_on_battery = true
battery_percent = 40
pause_on_metered = true
pause_when_active = 15
""".replace("KEY", KEY)


def test_nothing_written_means_no_limit() -> None:
    offer = read_policy("").offer()
    assert (offer.cores, offer.memory_bytes, offer.upload_bps, offer.paused) == (0.0, 0, 0.0, "")
    assert offer.kinds == list(KINDS)
    assert offer.text == []


def test_everything_written_is_offered_in_plain_units_and_words() -> None:
    policy = read_policy(WHOLE)
    offer = policy.offer(paused="on battery")
    assert offer.cores == 4.0
    assert offer.memory_bytes == 8 * 10**9
    assert offer.disk_bytes == 20_500_000_000
    assert (offer.upload_bps, offer.download_bps) == (20e6, 50e6)
    assert offer.kinds == ["trainer", "signed"]
    assert (offer.labels, offer.mounts) == (["home"], ["/data"])
    assert offer.paused == "on battery"
    text = "\n".join(offer.text)
    for words in (
        "at most 4 cores",
        "at most 8 GB of memory",
        "20 Mbit/s up",
        "runs only: trainer, signed",
        "no work 22:00-07:00",
        "no work on battery at or below 40 %",
        "metered",
        "idle for 15 minutes",
    ):
        assert words in text


def test_an_owner_keeps_the_accelerator_or_offers_one() -> None:
    kept, one = read_policy('device = "cpu"').offer(), read_policy('device = "cuda:1"').offer()
    assert (kept.device, kept.text) == ("cpu", ["no work on the accelerator"])
    assert (one.device, one.text) == ("cuda:1", ["computes on cuda:1 only"])
    with pytest.raises(ConfigError, match="device in"):
        read_policy('device = "gpu"')


def test_options_win_over_the_file_and_absent_ones_do_not() -> None:
    policy = read_policy(WHOLE, options={"cores": 2.0, "memory_gb": None, "kinds": ["trainer"]})
    assert (policy.cores, policy.memory_gb, policy.kinds) == (2.0, 8.0, ["trainer"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\ncorse = 4", ["node.toml, line 2", "did you mean 'cores'?"]),
        ("# first\n\ncores = 'four'", ["cores in node.toml, line 3", "'four'", "float"]),
        ("cores = -1", ["cores in node.toml, line 1", "-1"]),
        ("nice = 20", ["nice in node.toml, line 1", "0 to 19"]),
        ("kinds = ['traner']", ["line 1", "did you mean 'trainer'?"]),
        ("cores = 1\nquiet_hours = '25:00-07:00'", ["quiet_hours", "line 2", "22:00-07:00"]),
        ("cores = inf", ["cores", "inf"]),
        ("battery_percent = 0", ["battery_percent", "line 1"]),
        ("upload_mbps = 0.1", ["upload_mbps", "line 1", "at least 0.5"]),
        ("trusted_keys = 'mine'", ["trusted_keys", "line 1"]),
        ("kinds = 'signed'", ["allows no job", "trusted_keys"]),
        ("cores =\nnice = 1", ["not valid TOML", "line 1"]),
        ("[limits]\ncores = 2", ["limits", "line 1"]),
    ],
)
def test_mistakes_name_key_line_and_remedy(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_policy(text)
    for word in words:
        assert word in str(caught.value)


def at(day: int, hour: int, minute: int = 0) -> datetime.datetime:
    """Return a time in a week that begins with a Monday."""
    return datetime.datetime(2024, 1, day, hour, minute)


@pytest.mark.parametrize(
    ("text", "now", "end"),
    [
        ("22:00-07:00", at(1, 23), at(2, 7)),
        ("22:00-07:00", at(2, 6, 59), at(2, 7)),
        ("22:00-07:00", at(2, 7), None),
        ("22:00-07:00", at(2, 21, 59), None),
        ("mon-fri 09:00-17:00", at(5, 9), at(5, 17)),
        ("mon-fri 09:00-17:00", at(6, 9), None),
        ("sat,sun 00:00-24:00", at(7, 23, 59), at(8, 0)),
        ("sat,sun 00:00-24:00", at(8, 0), None),
        ("fri-mon 20:00-06:00", at(2, 5), at(2, 6)),
        ("fri 20:00-06:00", at(6, 5), at(6, 6)),
        ("fri 20:00-06:00", at(5, 5), None),
        ("Monday 12:00-13:00", at(1, 12, 30), at(1, 13)),
    ],
)
def test_quiet_hours_begin_and_end_where_they_say(
    text: str, now: datetime.datetime, end: datetime.datetime | None
) -> None:
    assert parse_quiet_hours(text).end_of(now) == end


@pytest.mark.parametrize("text", ["", "22-07", "22:60-07:00", "someday 1:00-2:00", "24:00-01:00"])
def test_quiet_hours_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="22:00-07:00"):
        parse_quiet_hours(text)


def write(path: Path, text: str) -> None:
    """Replace a file, with a time of change that no clock's grain can hide."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_only_a_valid_policy_file_is_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    file = OwnerPolicyFile(path, options={"nice": 5})
    assert file.read() == OwnerPolicy(nice=5)
    write(path, "cores = 2")
    assert file.read() == OwnerPolicy(cores=2.0, nice=5)
    write(path, "cores = 'two'")
    assert file.read() == OwnerPolicy(cores=2.0, nice=5)
    assert "line 1" in file.error
    write(path, "cores = 3")
    assert file.read().cores == 3.0
    assert not file.error
    path.unlink()
    assert file.read() == OwnerPolicy(nice=5)


def test_wrong_or_missing_policy_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    with pytest.raises(ConfigError, match="policy file does not exist"):
        OwnerPolicyFile(path, needed=True).read()
    path.write_text("colour = 1")
    with pytest.raises(ConfigError, match=r"own\.toml, line 1"):
        OwnerPolicyFile(path, needed=True).read()


def test_the_policy_that_the_documentation_shows_is_one() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operate" / "policy.md").read_text()
    policy = read_policy(page.partition("```toml\n")[2].partition("```")[0])
    unsaid = [
        field.name
        for field in dataclasses.fields(OwnerPolicy)
        if f"{field.name} = " not in page.partition("```toml")[2]
    ]
    assert not unsaid
    assert policy.cores == 4.0
