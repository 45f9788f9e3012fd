from __future__ import annotations

from typing import Any

from atoll.rounds.replicas import Comparison, compare


def end(digest: str, **tensors: str) -> dict[str, Any]:
    own = {"bn.count": tensors.pop("count")} if "count" in tensors else {}
    return {
        "digest": digest, "rounds": 5, "steps": 50, "tensors": tensors, "own_tensors": own,
    }  # fmt: skip


def test_a_difference_names_members_and_tensors() -> None:
    found = compare({"w0": end("x", a="1", b="1"), "w1": end("x", a="1", b="1"),
                     "w2": end("y", a="1", b="2")})  # fmt: skip
    assert found.identical is False
    assert found.odd == ("w2",)
    assert found.note == "w2 and w0 differ in b"


def test_values_of_other_types_hide_no_difference() -> None:
    keys = ("digest", "rounds", "steps", "tensors", "own_tensors", "stage", "modules",
            "module_rounds")  # fmt: skip
    for odd in (None, [], [1], {"x": []}, "1e5", float("nan"), 1e999, "9" * 5000, object()):
        for key in keys:
            found = compare({"w0": end("x", a="1"), "w1": end("y", a="2"),
                             "w2": {**end("x"), key: odd}})  # fmt: skip
            assert found.identical is False, (key, odd)
            assert "w1" in found.odd


def test_many_tensors_are_shortened() -> None:
    one, other = (end(d, **{f"t{n}": d for n in range(9)}) for d in "xy")
    assert compare({"w0": one, "w1": other}).note.endswith("t0, t1, t2, t3, t4 and 4 more")


def test_what_each_member_keeps_for_itself_is_said_and_no_fault() -> None:
    found = compare({"w0": end("x", a="1", count="7"), "w1": end("x", a="1", count="8")})
    assert found.identical is True
    assert found.note == "each member's own: bn.count"
    assert compare({"w0": end("x", a="1"), "w1": end("x", a="1")}).note == ""


def test_members_without_a_digest_are_not_compared() -> None:
    assert compare({}).identical is None
    assert compare({"w0": end(""), "w1": end("")}).identical is None
    assert compare({"w0": end("x")}).identical is True, "one member is its own replica"
    assert compare({"w0": end("x"), "w1": end("")}).identical is None


def test_members_of_a_swarm_are_compared_within_their_stage() -> None:
    first = {"w0": end("x", a="1") | {"stage": 0}, "w1": end("x", a="1") | {"stage": 0}}
    second = {"w2": end("y", b="1") | {"stage": 1}, "w3": end("y", b="1") | {"stage": 1}}
    assert compare(first | second, nodes=4).identical is True
    second["w3"] = end("z", b="2") | {"stage": 1}
    found = compare(first | second, nodes=4)
    assert (found.identical, found.odd) == (False, ("w3",))
    assert found.note == "stage 1: w3 and w2 differ in b"
    del second["w3"]
    assert compare(first | second, nodes=4) == Comparison(True)
