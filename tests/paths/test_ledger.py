"""Phases, turns and meetings of members that train the paths of a model."""

from __future__ import annotations

import pytest

from atoll.errors import ConfigError
from atoll.paths.assign import assign
from atoll.paths.layout import PathLayout
from atoll.paths.ledger import PathLedger, PathSettings
from atoll.wire.paths import PathAsk, PathReport, PathTrained, PathTurn

LAYOUT = PathLayout.of([2, 2])


def ledger(*members: str, start_s: float = 60.0) -> PathLedger:
    settings = PathSettings(layout=LAYOUT, save_every=1, start_s=start_s)
    return PathLedger(settings, 0, set(members), 0.0)


def ask(book: PathLedger, member: str, phase: int = -1, now: float = 0.0) -> PathTurn | None:
    return book.ask(member, PathAsk(phase, phases=3, process=member), now)


def train(book: PathLedger, member: str) -> bool:
    found = book.train(member, PathTrained(book.phase))
    return found is not None and found.meet


def report(book: PathLedger, member: str, *reports: PathReport) -> None:
    book.train(member, PathTrained(book.phase, list(reports)))


def test_reports_of_paths_are_counted_once() -> None:
    book = ledger("w0")
    ask(book, "w0")
    for _ in range(2):  # the second is the same request again
        report(book, "w0", PathReport(0, 10, tokens=40, loss=2.0, held_out=3.0, measured=0))
    commit_all(book)
    ask(book, "w0", 1)
    report(book, "w0", PathReport(0, 20, tokens=40, loss=1.5, held_out=3.5, measured=10))
    again = ledger("w0")
    again.recall(book.record())
    report(again, "w0", PathReport(0, 20, tokens=40, loss=1.5, held_out=3.5, measured=10))
    known = again.progress[0]
    assert (known.member, known.step, known.tokens, known.loss) == ("w0", 20, 80, 1.5)
    assert (known.held_out, known.best_step, again.best[0]) == (3.5, 0, 3.0)


def test_reports_of_paths_of_others_are_ignored() -> None:
    book = ledger("w0", "w1")
    for member in ("w0", "w1", "w0"):
        ask(book, member)
    report(book, "w0", *(PathReport(path, 10, exported=True) for path in (0, 1, 99)))
    assert (set(book.progress), book.exported) == ({0}, {0})


def commit_all(book: PathLedger) -> None:
    for module, there in book.meets.items():
        if there:
            book.committed(module, there)
            book.rounds[module] = book.rounds.get(module, 0) + 1


def test_paths_take_one_module_of_each_level() -> None:
    layout = PathLayout.of([2, 1, 3])
    assert (layout.num_paths, layout.num_modules, layout.levels) == (6, 6, 3)
    assert [layout.modules_of(path) for path in (0, 1, 3, 5)] == [
        (0, 2, 3), (0, 2, 4), (1, 2, 3), (1, 2, 5),
    ]  # fmt: skip
    assert [layout.level_of(module) for module in range(6)] == [0, 0, 1, 2, 2, 2]
    assert layout.paths_through(2) == list(range(6))
    assert layout.paths_through(4) == [1, 4]


def test_copies_of_a_path_have_the_same_modules() -> None:
    layout = PathLayout.of([2, 1], copies=3)
    assert layout.num_paths == 6
    assert [layout.modules_of(path) for path in range(6)] == [(0, 2)] * 3 + [(1, 2)] * 3
    assert layout.paths_through(0) == [0, 1, 2]


def test_a_level_without_modules_is_refused() -> None:
    for wrong in ([], [2, 0]):
        with pytest.raises(ConfigError, match="a module or more"):
            PathLayout.of(wrong)


def test_the_first_phase_waits_for_all_that_were_launched() -> None:
    book = ledger("w0", "w1")
    assert ask(book, "w0") is None
    second = ask(book, "w1")
    assert second is not None
    assert second.paths == [1, 3]
    first = ask(book, "w0")
    assert first is not None
    assert first.paths == [0, 2]


def test_the_first_phase_does_not_wait_for_ever() -> None:
    book = ledger("w0", "w1", start_s=60.0)
    assert ask(book, "w0", now=59.0) is None
    found = ask(book, "w0", now=61.0)
    assert found is not None
    assert found.paths == [0, 1, 2, 3]


def test_holders_meet_once_all_paths_are_trained() -> None:
    book = ledger("w0", "w1")
    for member in ("w0", "w1", "w0"):
        ask(book, member)
    assert not train(book, "w0")
    assert book.groups_of("w0") == []
    assert train(book, "w1")
    assert train(book, "w0")
    assert book.groups_of("w0") == [0, 1, 2]
    assert book.groups_of("w1") == [0, 1, 3]


def test_a_lost_members_paths_go_to_others_in_the_next_phase() -> None:
    book = ledger("w0", "w1")
    for member in ("w0", "w1", "w0"):
        ask(book, member)
    assert not train(book, "w0")
    book.gone("w1")
    assert train(book, "w0")
    commit_all(book)
    turn = ask(book, "w0", phase=1)
    assert turn is not None
    assert (turn.phase, turn.paths) == (1, [0, 1, 2, 3])
    # Module 3 was held by the lost member alone, and 0, 1, 2 are held.
    assert (turn.donors, turn.checkpoint) == ({}, -1)
    assert "w1" not in book.holds[0]


def test_a_phase_begins_when_all_have_met() -> None:
    book = ledger("w0", "w1")
    for member in ("w0", "w1", "w0"):
        ask(book, member)
    for member in ("w0", "w1"):
        train(book, member)
    commit_all(book)
    assert ask(book, "w2") is None
    assert ask(book, "w1", phase=1) is None
    late = book.train("w0", PathTrained(0))
    assert late is not None
    assert late.meet  # its first answer was lost
    assert book.groups_of("w1") == []
    assert book.groups_of("w0") == [0, 1, 2]
    assert ask(book, "w0", phase=1) is not None
    assert book.phase == 1
    assert book.missed == {}


def test_what_a_lost_member_trained_is_noted() -> None:
    book = ledger("w0", "w1")
    for member in ("w0", "w1", "w0"):
        ask(book, member)
    for member in ("w0", "w1"):
        train(book, member)
    book.committed(0, {"w0", "w1"})
    book.gone("w1")
    for module in (1, 2):
        book.committed(module, {"w0"})
    assert book.groups_of("w0") == [0, 1, 2]
    assert ask(book, "w0", phase=1) is not None
    assert book.missed == {0: {1: "w1", 3: "w1"}}


def test_a_process_that_is_new_holds_nobody_up() -> None:
    book = ledger("w0", "w1")
    for member in ("w0", "w1", "w0"):
        ask(book, member)
    for member in ("w0", "w1"):
        train(book, member)
    assert book.ask("w1", PathAsk(phases=3, process="another"), 0.0) is None
    assert book.groups_of("w1") == []
    assert ask(book, "w0", phase=1) is not None
    assert sorted(book.assigned) == ["w0", "w1"]


def test_who_could_not_get_its_modules_gets_the_next_turn() -> None:
    book = ledger("w0", "w1")
    for member in ("w0", "w1", "w0"):
        ask(book, member)
    assert not train(book, "w1")
    lost = PathAsk(0, phases=3, lost=True, process="w0")
    assert book.ask("w0", lost, 0.0) is None
    assert train(book, "w1")
    commit_all(book)
    late = book.train("w0", PathTrained(0))
    assert late is not None
    assert late.void
    ask(book, "w1", phase=1)
    turn = book.ask("w0", lost, 0.0)
    assert turn is not None
    assert (turn.phase, turn.paths) == (1, [0, 2])


def test_a_newcomer_gets_paths_and_donors_in_the_next_phase() -> None:
    book = ledger("w0")
    assert ask(book, "w0") is not None
    assert ask(book, "w1") is None
    assert train(book, "w0")
    commit_all(book)
    assert ask(book, "w0", phase=1) is not None
    turn = ask(book, "w1")
    assert turn is not None
    assert turn.paths == book.assigned["w1"]
    assert len(turn.paths) == 2
    assert turn.donors == {m: ["w0"] for m in LAYOUT.modules_in(turn.paths)}


def test_each_module_is_saved_by_one_of_its_holders() -> None:
    book = ledger("w0", "w1")
    for member in ("w0", "w1", "w0"):
        ask(book, member)
    assert book.save == {}
    for member in ("w0", "w1"):
        train(book, member)
    commit_all(book)
    for member in ("w0", "w1"):
        ask(book, member, phase=1)
    assert sorted(module for saved in book.save.values() for module in saved) == [0, 1, 2, 3]
    for member, saved in book.save.items():
        other = "w1" if member == "w0" else "w0"
        assert all(book.saves(member, 1, module) for module in saved)
        assert not any(book.saves(other, 1, m) or book.saves(member, 2, m) for m in saved)
        assert set(saved) <= set(LAYOUT.modules_in(book.assigned[member]))


def test_the_run_ends_when_every_path_is_exported() -> None:
    book = ledger("w0", "w1")
    for member in ("w0", "w1", "w0"):
        ask(book, member)
    for phase in range(1, 4):
        for member in ("w0", "w1"):
            train(book, member)
        commit_all(book)
        for member in ("w0", "w1"):
            ask(book, member, phase=phase)
    assert book.last
    reports = [PathReport(path, exported=True) for path in book.assigned["w0"]]
    book.train("w0", PathTrained(book.phase, reports))
    book.gone("w1")
    left = ask(book, "w0", phase=4)
    assert left is not None
    assert left.last
    assert not left.over
    assert left.paths == [1, 3]
    reports = [PathReport(path, exported=True) for path in left.paths]
    book.train("w0", PathTrained(book.phase, reports))
    end = ask(book, "w0", phase=4)
    assert end is not None
    assert end.over


def test_all_go_back_to_the_checkpoint_if_nobody_is_left() -> None:
    book = ledger("w0")
    ask(book, "w0")
    for phase in (1, 2):
        train(book, "w0")
        commit_all(book)
        ask(book, "w0", phase=phase)
    assert book.phase == 2
    book.checkpoint = 1
    book.gone("w0")
    turn = ask(book, "w1")
    assert turn is not None
    assert (turn.phase, turn.checkpoint, turn.history) == (1, 1, 1)


def test_a_restarted_hub_goes_on_in_the_same_phase() -> None:
    book = ledger("w0", "w1")
    for member in ("w0", "w1", "w0"):
        ask(book, member)
    again = ledger()
    again.recall(book.record())
    held = {0: 0, 1: 0, 2: 0}
    assert ask(again, "w2") is None  # a newcomer waits
    again.rounds = dict.fromkeys(range(4), 0)
    again.hold("w0", PathAsk(held=held))
    assert not train(again, "w0")
    assert train(again, "w1")
    assert again.groups_of("w0") == [0, 1, 2]


def test_paths_stay_where_they_are_as_far_as_that_is_even() -> None:
    before = {"w0": [0, 1, 2, 3]}
    dealt = assign(LAYOUT, range(4), ["w0", "w1"], before=before, holds={"w0": [0, 1, 2, 3]})
    assert dealt == {"w0": [0, 1], "w1": [2, 3]}
    dealt = assign(LAYOUT, range(4), ["w1", "w2", "w3"], before={"w1": [2, 3]}, holds={})
    assert sorted(map(len, dealt.values())) == [1, 1, 2]
    assert dealt["w1"][0] in (2, 3)
    more = assign(LAYOUT, range(4), [f"w{n}" for n in range(6)], before={}, holds={})
    assert sorted(map(len, more.values())) == [0, 0, 1, 1, 1, 1]
