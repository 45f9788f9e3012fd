"""`atoll sign`, as a person uses it: key, signature, and an agent that believes it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.config import parse_spec
from atoll.errors import NotAllowed
from atoll.node.availability.quiet_hours import check_allowed
from atoll.wire.messages import Offer

IMAGE = f"registry.example:5000/team/train@sha256:{'0a' * 32}"


def atoll(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    told = capsys.readouterr()
    return int(left.value.code or 0), told.out + told.err


def test_printed_policy_and_job_file_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, told = atoll(capsys, "sign", "key", "anna")
    assert code == 0
    policy = tomllib.loads(told[told.index("kinds") :])
    assert (tmp_path / "anna.key").stat().st_mode & 0o077 == 0

    code, told = atoll(capsys, "sign", "image", IMAGE, "--key", "anna.key")
    assert code == 0
    spec = parse_spec(told)
    offer = Offer(kinds=policy["kinds"])
    check_allowed(spec, member="w0", offer=offer, trusted_keys=policy["trusted_keys"])
    with pytest.raises(NotAllowed):
        check_allowed(
            parse_spec(told.replace("0a", "0b")),
            member="w0",
            offer=offer,
            trusted_keys=policy["trusted_keys"],
        )


def test_unpinned_image_and_existing_key_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    atoll(capsys, "sign", "key", "anna")
    code, told = atoll(capsys, "sign", "key", "anna")
    assert code == 2
    assert "cannot be written" in told
    code, told = atoll(capsys, "sign", "image", "train:1", "--key", "anna.key")
    assert code == 2
    assert "not pinned" in told
