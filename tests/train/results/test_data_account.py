from __future__ import annotations

from atoll.train.results.data_account import account


def test_a_complete_pass_is_exact() -> None:
    both = [{"0": [1, 0, 300], "1": [0, 300, 300]}]
    found = account({"w0": {"data": both}, "w1": {"data": both}}, samples_given=600)
    assert found == {"given": 600, "committed": 600, "repeated": 0, "missed": 0}


def test_what_lacks_in_a_completed_pass_is_missed() -> None:
    found = account({"w0": {"data": [{"0": [1, 0, 300], "1": [0, 168, 300]}]}}, samples_given=500)
    assert found == {"given": 500, "committed": 468, "repeated": 32, "missed": 132}


def test_a_run_that_ends_inside_a_pass_misses_nothing() -> None:
    found = account({"w0": {"data": [{"0": [2, 40, 300], "1": [2, 10, 300]}]}}, samples_given=1250)
    assert found == {"given": 1250, "committed": 1250, "repeated": 0, "missed": 0}


def test_the_furthest_report_of_a_slot_counts() -> None:
    early, late = [{"0": [0, 10, 30], "1": [0, 12, 30]}], [{"1": [1, 0, 30]}, {"0": [0, 5, 9]}]
    found = account({"w0": {"data": early}, "w1": {"data": late}}, samples_given=45)
    assert found == {"given": 45, "committed": 45, "repeated": 0, "missed": 20}


def test_without_shared_data_there_is_no_account() -> None:
    assert account({"w0": {"data": [{}]}, "w1": {}}, samples_given=0) is None
