"""Secrets by reference: the keys of the place for copies, and tokens that a process needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.checkpoint import DirectoryStore, SavePoint
from atoll.clock import RealClock
from atoll.config import dump_spec, parse_spec
from atoll.config.redaction import copy_options, secrets_of
from atoll.config.writing import without_secrets
from atoll.errors import ConfigError
from atoll.hub.storage.backup import take
from atoll.ids import new_suffix
from atoll.net.http.client import HubClient
from tests.checkpoint.savers import parts
from tests.security.conftest import login, operator, serving, stores_of, until, web

KEY = "AKIA-0123456789-secret"
SPEC = """
[job]
name = "toy"
nodes = 1
[launch]
env = ["WANDB_API_KEY=secret:WANDB", "PLAIN=1"]
[checkpoint]
to = "s3://bucket/runs"
to_options = ["key=secret:S3_KEY", "secret=secret:S3_SECRET", "endpoint_url=http://s3.local"]
"""


def test_references_are_read_written_and_listed() -> None:
    spec = parse_spec(SPEC)
    assert spec.launch.secrets == ["WANDB_API_KEY=WANDB"]
    assert spec.launch.env == ["PLAIN=1"]
    assert secrets_of(spec) == ["S3_KEY", "S3_SECRET", "WANDB"]
    assert parse_spec(dump_spec(spec)) == spec
    values = {"S3_KEY": "k" * 8, "S3_SECRET": KEY}
    assert copy_options(spec.checkpoint, values) == {
        "key": "k" * 8, "secret": KEY, "endpoint_url": "http://s3.local",
    }  # fmt: skip


def test_viewers_see_names_of_secrets_and_no_values() -> None:
    shown = without_secrets(SPEC)
    assert "key=secret:S3_KEY" in shown
    assert "endpoint_url=(hidden)" in shown
    assert "s3.local" not in shown
    assert "PLAIN=(hidden)" in shown


@pytest.mark.parametrize(
    "line", ["key", "=x", "key=secret:", "key=secret:a-b", "a-b=c", f"key secret:{KEY}"]
)
def test_wrong_options_are_refused_without_their_values(line: str) -> None:
    text = SPEC.replace("key=secret:S3_KEY", line)
    with pytest.raises(ConfigError, match="to_options") as refused:
        parse_spec(text)
    assert KEY not in str(refused.value).partition("=")[2] or "=" not in line


def test_options_without_a_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="need a place"):
        parse_spec(SPEC.replace("s3://bucket/runs", ""))


def test_a_job_with_unknown_secrets_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as hub, operator(hub) as client:
        client.set_secret("WANDB", KEY)
        client.set_secret("S3_KEY", KEY)
        with pytest.raises(ConfigError, match="unknown secret"):
            client.submit(SPEC)
        client.set_secret("S3_SECRET", KEY)
        job = client.submit(SPEC)
        token = hub.call(stores_of(hub).auth.issue_job_token(job))
        with web(hub, token) as process:  # the keys of the copies stay at the hub
            assert process.get(f"/api/jobs/{job}/secrets").json() == {"WANDB": KEY}
        with web(hub, login(hub, "viewer")) as viewer:
            seen = viewer.get(f"/api/jobs/{job}").text
            seen += viewer.get(f"/api/jobs/{job}/files/job.toml").text
        assert KEY not in seen + str((client.job(job), client.events(job), client.audit()))
        taken = take(tmp_path / "backup", data=tmp_path / "data", clock=RealClock())
        found = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert taken.path.exists()
        assert not [path for path in found if KEY.encode() in path.read_bytes()]


def test_copies_use_the_keys_and_messages_hide_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address is wrong, and part of the driver's message; the next start has another."""
    reason = "needs pip install 'atoll[store-test]'"
    s3fs = pytest.importorskip("s3fs", reason=reason)
    moto = pytest.importorskip("moto.server", reason=reason)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("atoll.hub.storage.replication.FIRST_PAUSE_S", 0.01)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        place = f"http://{host}:{port}"
        files = s3fs.S3FileSystem(key="k", secret="s", endpoint_url=place)
        bucket = f"bucket-{new_suffix()}".lower()
        files.mkdir(bucket)
        with serving(tmp_path) as hub, operator(hub) as client:
            nowhere = f"http://127.0.0.1:9/{KEY}"
            for name, value in (("S3_KEY", KEY), ("S3_SECRET", KEY), ("PLACE", nowhere)):
                client.set_secret(name, value)
            text = SPEC.replace('env = ["WANDB_API_KEY=secret:WANDB", "PLAIN=1"]', "")
            text = text.replace("bucket/runs", f"{bucket}/runs")
            job = client.submit(text.replace("endpoint_url=http://s3.local", OPTION))
            folder = tmp_path / "jobs" / job
            DirectoryStore(folder, keep=9).put(SavePoint(1, 10, "w0", ["w0"]), parts(1.0))
            checkpoints = hub.hub.checkpoints  # type: ignore[union-attr]

            async def copy() -> None:
                checkpoints._copy(job)

            hub.call(copy())
            failed = until(lambda: events_of(client, job, "checkpoint-copy-failed"))
            assert "(secret PLACE)" in failed[0]["text"]
            assert KEY not in str(client.events(job))
            client.set_secret("PLACE", place)
            until(lambda: events_of(client, job, "checkpoint-copied"))
            assert files.ls(f"{bucket}/runs/{job}/checkpoints")
    finally:
        server.stop()


OPTION = "endpoint_url=secret:PLACE"


def events_of(client: HubClient, job: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in client.events(job)["events"] if event["kind"] == kind]
