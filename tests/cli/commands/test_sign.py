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
    output = capsys.readouterr()
    return int(left.value.code or 0), output.out + output.err


def test_printed_policy_and_job_file_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = atoll(capsys, "sign", "key", "anna")
    assert code == 0
    policy = tomllib.loads(output[output.index("kinds") :])
    assert (tmp_path / "anna.key").stat().st_mode & 0o077 == 0

    code, output = atoll(capsys, "sign", "image", IMAGE, "--key", "anna.key")
    assert code == 0
    spec = parse_spec(output)
    offer = Offer(kinds=policy["kinds"])
    check_allowed(spec, member="w0", offer=offer, trusted_keys=policy["trusted_keys"])
    with pytest.raises(NotAllowed):
        check_allowed(
            parse_spec(output.replace("0a", "0b")),
            member="w0",
            offer=offer,
            trusted_keys=policy["trusted_keys"],
        )


def test_unpinned_image_and_existing_key_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    atoll(capsys, "sign", "key", "anna")
    code, output = atoll(capsys, "sign", "key", "anna")
    assert code == 2
    assert "cannot be written" in output
    code, output = atoll(capsys, "sign", "image", "train:1", "--key", "anna.key")
    assert code == 2
    assert "not pinned" in output
