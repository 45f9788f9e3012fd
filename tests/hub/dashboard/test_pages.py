"""What the page takes from the network: all of it compressed, and little."""

from __future__ import annotations

import httpx

from atoll.hub.dashboard.pages import FOLDER
from atoll.hub.server import HubServer
from tests.patience import PATIENCE_S

MOST_BYTES = 300_000
"""The whole page with all its parts; before, plotly alone had 4.8 MB."""


def test_the_whole_page_is_sent_compressed_and_is_small(hub: HubServer) -> None:
    files = [path for path in FOLDER.rglob("*") if path.suffix in (".js", ".css")]
    assert len(files) > 30
    received = 0
    with httpx.Client(base_url=hub.url, trust_env=False, timeout=PATIENCE_S) as client:
        client.get("/", params={"token": hub.operator_token}, follow_redirects=True)
        for path in files:
            place = f"/static/{path.relative_to(FOLDER).as_posix()}"
            with client.stream("GET", place, headers={"accept-encoding": "gzip"}) as answer:
                assert answer.status_code == 200, place
                if path.stat().st_size > 2_000:
                    assert answer.headers["content-encoding"] == "gzip", place
                received += len(b"".join(answer.iter_raw()))
    assert received < MOST_BYTES / 2, received
    assert received < 0.5 * sum(path.stat().st_size for path in files)
