"""Names of files, blobs and static files that try to leave their folder, and archives that do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.hub.server import HubServer
from tests.patience import PATIENCE_S
from tests.security.conftest import SPEC, operator, read_to_end, serving
from tests.tiers import examples

OUTSIDE = "outside.txt"

ESCAPES = [
    "../{name}", "../../{name}", "..%2f..%2f{name}", "%2e%2e/%2e%2e/{name}", "a/../../{name}",
    "..%5c{name}", "/etc/passwd", "%2fetc%2fpasswd", "a/%00/{name}", "./{name}", "a//{name}",
    "..%252f{name}", "~/{name}", ".hidden/../../{name}",
]  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    with serving(folder) as server:
        (folder / OUTSIDE).write_text("secret outside")
        (folder / "jobs").mkdir(exist_ok=True)
        (folder / "jobs" / OUTSIDE).write_text("secret outside")
        yield server


@pytest.fixture(scope="module")
def job(hub: HubServer) -> str:
    with operator(hub) as client:
        return client.submit(SPEC)


def ask(hub: HubServer, method: str, path: str, body: bytes = b"") -> bytes:
    """Send an address as it is: clients of HTTP tidy it up."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: hub\r\nConnection: close\r\n"
        f"Authorization: Bearer {hub.operator_token}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", hub.port), timeout=PATIENCE_S) as opened:
        opened.sendall(head.encode("utf-8", "surrogatepass") + body)
        return read_to_end(opened)


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and "sqlite" not in path.name}


@pytest.mark.parametrize("name", ESCAPES)
def test_files_of_jobs_stay_in_the_folder_of_the_job(hub: HubServer, job: str, name: str) -> None:
    assert hub.hub is not None
    folder = hub.hub.options.data.parent
    before = files_below(folder)
    for base in (f"/api/jobs/{job}/files/", "/static/", "/api/blobs/"):
        path = base + name.format(name=OUTSIDE)
        assert b"secret outside" not in ask(hub, "GET", path)
        assert b"root:" not in ask(hub, "GET", path)
        ask(hub, "PUT", path, b"overwritten")
    inside = hub.hub.stores.jobs.folder(job)
    new = {path for path in files_below(folder) - before if inside not in path.parents}
    assert new == set()
    assert (folder / OUTSIDE).read_text() == "secret outside"


@pytest.mark.parametrize("name", ["..", ".", "..%2f" + OUTSIDE, "a%2fb"])
def test_ids_of_jobs_are_no_paths(hub: HubServer, name: str) -> None:
    answer = ask(hub, "GET", f"/api/jobs/{name}/files/job.toml")
    assert b" 404 " in answer.partition(b"\r\n")[0] or b" 400 " in answer.partition(b"\r\n")[0]


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    parts=st.lists(
        st.sampled_from(["..", ".", "", "a", "%2e%2e", "%2f", "..%2f", "\\", "%00", OUTSIDE]),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_no_name_reaches_what_lies_outside(hub: HubServer, job: str, parts: list[str]) -> None:
    answer = ask(hub, "GET", f"/api/jobs/{job}/files/{'/'.join(parts)}")
    assert b"secret outside" not in answer
    assert b" 500 " not in answer.partition(b"\r\n")[0]


def test_links_in_the_folder_of_a_job_are_not_followed_out_of_it(hub: HubServer, job: str) -> None:
    assert hub.hub is not None
    folder = hub.hub.stores.jobs.folder(job)
    (folder / "link.txt").symlink_to(hub.hub.options.data.parent / OUTSIDE)
    (folder / "up").symlink_to(hub.hub.options.data.parent)
    for name in ("link.txt", f"up/{OUTSIDE}"):
        assert b"secret outside" not in ask(hub, "GET", f"/api/jobs/{job}/files/{name}")
