"""`bench.small_tensors` on a few tensors: every method has its row."""

from __future__ import annotations

from bench.small_tensors import METHODS, rows


def test_every_method_has_its_figures() -> None:
    found = rows(tensors=5, steps=2)
    assert [row["method"] for row in found] == list(METHODS)
    assert all(row["bare_ms"] > 0 for row in found)
