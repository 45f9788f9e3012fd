from __future__ import annotations

import pytest

from atoll.cli.jobs.embedded import accelerators_of
from atoll.config.environment import visible_accelerators


@pytest.mark.parametrize(
    ("nodes", "visible", "expected"),
    [
        (1, ["0", "1"], [[]]),
        (4, [], [[], [], [], []]),
        (4, ["0"], [[], [], [], []]),
        (2, ["0", "1"], [["0"], ["1"]]),
        (2, ["0", "1", "2", "3"], [["0", "2"], ["1", "3"]]),
        (3, ["4", "GPU-a"], [["4"], ["GPU-a"], ["4"]]),
    ],
)
def test_local_nodes_share_out_the_accelerators(
    nodes: int, visible: list[str], expected: list[list[str]]
) -> None:
    assert [accelerators_of(number, nodes, visible) for number in range(nodes)] == expected


def test_accelerators_that_this_process_may_not_use_stay_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_accelerators(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_accelerators(8) == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_accelerators(8) == []
