from __future__ import annotations

from pathlib import Path

from atoll.fleet.fleet import Link
from atoll.fleet.kept_links import FILE, KEPT_S, keep_links, kept_links

LINKS = [
    Link(between=["a", "b"], mbps=50.0, latency_ms=3.0), Link(between=["b", "c"], mbps=5.0)
]  # fmt: skip


def test_links_are_those_of_the_hub_between_nodes_that_are_there(tmp_path: Path) -> None:
    keep_links(tmp_path, "https://one", LINKS, now=1000.0)
    keep_links(tmp_path, "https://other", [], now=1000.0)
    assert kept_links(tmp_path, "https://one", {"a", "b", "c"}, now=2000.0) == LINKS
    assert kept_links(tmp_path, "https://one", {"a", "b"}, now=2000.0) == LINKS[:1]
    assert kept_links(tmp_path, "https://other", {"a", "b"}, now=2000.0) == []


def test_old_or_damaged_measurements_are_not_used(tmp_path: Path) -> None:
    assert kept_links(tmp_path, "https://one", {"a", "b"}, now=0.0) == []
    keep_links(tmp_path, "https://one", LINKS, now=1000.0)
    assert kept_links(tmp_path, "https://one", {"a", "b"}, now=1001.0 + KEPT_S) == []
    links = '{"between": ["a", "b"], "colour": 1}'
    for text in (
        "[",
        '{"https://one": []}',
        f'{{"https://one": {{"time": 1, "links": [{links}]}}}}',
    ):
        (tmp_path / FILE).write_text(text)
        assert kept_links(tmp_path, "https://one", {"a", "b"}, now=1000.0) == []
