"""What people see of paths: while they are trained, after the end, and in another hub process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.hub.observability.latest import Latest
from atoll.hub.paths.view import Around, PathState, view_of_paths
from atoll.hub.server import HubServer
from atoll.paths.layout import PathLayout
from atoll.paths.ledger import PathRecord
from atoll.paths.progress import PathProgress
from atoll.wire.messages import Done, Finished
from atoll.wire.paths import PathAsk, PathMeeting, PathReport, PathShard, PathTrained, PathTurn
from tests.hub.membership import Running, job_of, options, until

LAYOUT = PathLayout.of([2, 2])
TABLES = """
[train]
steps = 10
[strategy]
preset = "dipaco"
every = 10
[dipaco]
modules = [2]
"""


def around(**more: Any) -> Around:
    nothing: dict[str, Any] = {
        "ended": False, "nodes": {}, "holds": {}, "rounds": {}, "latest": {},
    }  # fmt: skip
    return Around(**(nothing | more))


def test_states_of_paths_in_a_phase() -> None:
    record = PathRecord(
        2, dealt={"w0": [0, 1], "w1": [2]}, phases=4,
        progress={0: PathProgress("w0", 30, 90, 2.0, phase=2), 3: PathProgress("w2", 20, phase=1)},
        shards=[PathShard(3, 50), PathShard(0, 0), PathShard(1, 8), PathShard(2, 9)],
    )  # fmt: skip
    latest = {"w0": Latest(step=24, values={"path": 1.0, "loss": 2.25})}
    view = view_of_paths(
        LAYOUT, record, around(latest=latest, nodes={"w1": "attic"}, holds={2: {"w10", "w1"}})
    )
    states = [path.state for path in view.paths]
    assert states == ["trained", "training", "training", "lost"]
    assert [(path.name, path.node) for path in view.paths[1:]] == [
        ("w0", ""), ("attic", "attic"), ("w2", ""),
    ]  # fmt: skip
    assert (view.paths[1].step, view.paths[1].loss) == (24, 2.25)
    assert list(view.empty) == [1]
    assert [path.modules for path in view.paths] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    (first, second), (third, _) = view.levels
    assert (first.paths, second.paths, third.paths) == ([0, 1], [2, 3], [0, 2])
    assert third.holders == ["attic", "w10"]


def test_a_path_stopped_early_if_it_was_better_before() -> None:
    record = PathRecord(
        2, phases=2, best={0: 1.5},
        progress={0: PathProgress("w0", 20, best_step=10, phase=2),
                  1: PathProgress("w0", 20, best_step=20, phase=2),
                  2: PathProgress("w1", 10, phase=1)},
    )  # fmt: skip
    view = view_of_paths(LAYOUT, record, around(ended=True))
    assert [path.stopped_early for path in view.paths] == [True, False, False, False]
    assert [path.state for path in view.paths[:3]] == [
        PathState.DONE, PathState.DONE, PathState.STOPPED,
    ]  # fmt: skip


def test_another_hub_shows_the_paths_of_a_job_that_ended(tmp_path: Path) -> None:
    shards = [PathShard(5, 60), PathShard(4, 30)]
    with HubServer(options(tmp_path)) as hub:
        group = Running(hub, nodes=1, more=TABLES)
        (peer,) = group.members
        begun = peer.request(PathAsk(phases=1, process="a", shards=shards))
        assert isinstance(begun, PathTurn)
        assert begun.paths == [0, 1]
        body = [PathReport(path, 10, tokens=40, loss=2.0 + path) for path in begun.paths]
        held = {0: 0, 1: 0}
        assert peer.request(PathTrained(0, body, held)) == PathMeeting(meet=True)
        last = peer.request(PathAsk(1, phases=1, held=held, process="a"))
        assert isinstance(last, PathTurn)
        assert last.last
        body = [PathReport(path, 10, held_out=3.0, measured=10, exported=True) for path in (0, 1)]
        peer.request(PathTrained(1, body, held))
        over = peer.request(PathAsk(1, phases=1, held=held, process="a"))
        assert isinstance(over, PathTurn)
        assert over.over
        assert isinstance(peer.request(Finished(True, {"loss": 1.0})), Done)
        until(lambda: job_of(hub, group.job).state == "done")
        before = seen(hub, group.job)
        peer.close()
        group.agent.close()
    with HubServer(options(tmp_path)) as hub:
        after = seen(hub, group.job)
    assert before["paths"] == after["paths"]
    assert [one["state"] for one in after["paths"]] == ["done", "done"]
    assert [(one["tokens"], one["loss"], one["best"]) for one in after["paths"]] == [
        (40, 2.0, 3.0), (40, 3.0, 3.0),
    ]  # fmt: skip
    assert [one["documents"] for one in after["paths"]] == [5, 4]


def seen(hub: HubServer, job: str) -> dict[str, Any]:
    assert hub.hub is not None
    found = hub.hub.live.paths(job)
    assert found is not None
    return found
