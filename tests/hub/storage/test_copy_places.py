"""Jobs may have checkpoints copied to object stores, and into folders that the owner opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.hub.options import HubOptions
from atoll.hub.server import HubServer
from atoll.hub.storage.copy_places import CopyPlaces
from atoll.net.http.client import HubClient
from tests.security.conftest import SPEC

URLS = ["", "s3://bucket/runs", "gs://b", "sftp://host/runs", "memory://x"]


@pytest.mark.parametrize("url", URLS)
def test_other_machines_are_always_allowed(url: str) -> None:
    CopyPlaces().check(url)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "/etc/cron.d",
            "file:///etc",
            "local:///etc",
            "{open}/../etc",
            "{open}/link/x",
            "{open}x",
        ),
        *("simplecache::file:///etc", "dir::/etc", "zip://a::{open}/b", "file://{open}/%2e%2e/b"),
        *("{open}x", "anything://{open}", "filecache::s3://bucket/x", "runs"),
    ],
)
def test_paths_of_the_hub_are_refused(url: str, tmp_path: Path) -> None:
    opened = tmp_path / "open"
    opened.mkdir()
    (opened / "link").symlink_to("/etc")
    for places in (CopyPlaces(), CopyPlaces((opened,))):
        with pytest.raises(ConfigError, match="may not be copied there"):
            places.check(url.format(open=opened))


def test_opened_folder_is_allowed(tmp_path: Path) -> None:
    places = CopyPlaces((tmp_path,))
    for url in (str(tmp_path), f"{tmp_path}/a/b", f"file://{tmp_path}/a%20b"):
        places.check(url)


def test_hub_refuses_a_job_that_would_write_elsewhere(tmp_path: Path) -> None:
    opened, elsewhere = tmp_path / "open", tmp_path / "elsewhere"
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False, copies=(opened,)
    )
    with (
        HubServer(options) as server,
        HubClient(server.url, server.operator_token) as client,
    ):
        client.submit(SPEC + f'\n[checkpoint]\nto = "{opened}/a"\n')
        with pytest.raises(ConfigError, match="may not be copied there") as refused:
            client.submit(SPEC + f'\n[checkpoint]\nto = "{elsewhere}"\n')
    assert "atoll hub --copies" in str(refused.value.remedy)
    assert not elsewhere.exists()


@pytest.mark.parametrize("url", ["file:/etc", "local:/etc", "~/x", "file://~/x", "file:~/x"])
def test_short_forms_of_paths_are_refused_from_an_opened_folder(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers take these for absolute paths, whatever folder the hub was started in."""
    monkeypatch.chdir(tmp_path)
    places = CopyPlaces((tmp_path,))
    places.check("runs")
    with pytest.raises(ConfigError, match="may not be copied there"):
        places.check(url)
