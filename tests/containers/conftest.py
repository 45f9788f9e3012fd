"""A daemon for all tests of a session, told to the product as a person would: by DOCKER_HOST."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("docker", reason="the extra atoll[docker] is not installed")

from tests.containers.daemons import Daemon, import_image, small_archive, start_daemon
from tests.containers.registry import Registry, start_registry

SMALL = "small:1"


@pytest.fixture(scope="session", params=["docker", "podman"])
def daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    with start_daemon(request.param, folder) as started:
        import_image(started, SMALL, small_archive())
        yield started


@pytest.fixture
def registry() -> Iterator[Registry]:
    with start_registry() as started:
        yield started
