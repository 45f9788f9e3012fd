"""Whether the members of a run ended with the same values, from what they reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.ids import slot_of

Results = Mapping[str, Mapping[str, Any]]

MOST_NAMES = 5
"""Most tensors named in one note."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict over the members' final states."""

    identical: bool | None
    """Every compared member ended with the same values; None: no two can be compared."""
    note: str = ""
    """What differs, or why members are not compared; empty if all are equal."""
    odd: tuple[str, ...] = ()
    """Members that differ from most others with the same number of steps and rounds."""


def compare(results: Results, *, nodes: int = 1) -> Comparison:
    """Compare the final digests of members that ended at the same step and round.

    Members that ended elsewhere, e.g. because they left earlier, hold other values: no fault.
    `nodes` is how many members the run began with. Members of a SWARM's stage are replicas of it,
    and members that hold a module of a model with paths are replicas of the module.
    """
    results = {member: _checked(result) for member, result in results.items()}
    if any(result.get("modules") for result in results.values()):
        return _of_modules(results)
    by_stage: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for member, result in results.items():
        by_stage[result["stage"]][member] = result
    if len(by_stage) > 1:
        return _of_stages(
            [
                # The only member of a stage has no replica to compare with.
                compare(found, nodes=nodes) if len(found) > 1 else Comparison(None)
                for _, found in sorted(by_stage.items())
            ]
        )
    members = sorted((m for m, r in results.items() if r.get("digest")), key=slot_of)
    if not members:
        return Comparison(None, "no member reported its parameters")
    if len(members) == 1 and max(nodes, len(results)) > 1:
        return Comparison(None, f"not comparable: only {members[0]} reported its parameters")
    if len({results[m]["digest"] for m in members}) == 1:
        return Comparison(True, _own(results, members))
    places: dict[tuple[int, int], list[str]] = defaultdict(list)
    for member in members:
        places[_place(results[member])].append(member)
    notes, odd = [], list[str]()
    for group in places.values():
        found, differ = _compare_group(results, group)
        notes += found
        odd += differ
    if odd:
        return Comparison(False, "; ".join(notes), tuple(odd))
    last = places[max(places)]
    ends = ", ".join(_ended(results, group) for group in places.values())
    if len(last) < 2:
        return Comparison(None, f"not comparable: {ends}")
    return Comparison(True, f"compared: {', '.join(last)}; not comparable: {ends}")


def _checked(result: object) -> dict[str, Any]:
    """Return what is compared of a result; values of another type count as not reported."""
    known = result if isinstance(result, Mapping) else {}
    tables = ("tensors", "own_tensors", "modules", "module_rounds")
    checked: dict[str, Any] = {key: _table(known.get(key)) for key in tables}
    for key in ("modules", "module_rounds"):
        checked[key] = {number: x for number, x in checked[key].items() if _is_number(number)}
    rounds = checked["module_rounds"]
    checked["module_rounds"] = {number: _whole(x) for number, x in rounds.items()}
    digest = known.get("digest")
    checked["digest"] = digest if isinstance(digest, str) else ""
    return checked | {key: _whole(known.get(key)) for key in ("steps", "rounds", "stage")}


def _table(value: object) -> dict[str, Any]:
    table = value if isinstance(value, Mapping) else {}
    return {name: entry for name, entry in table.items() if isinstance(name, str)}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _whole(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else 0


def _of_stages(found: Sequence[Comparison]) -> Comparison:
    """Return the verdict over the stages of one model: members compare with those of their own."""
    known = [one.identical for one in found if one.identical is not None]
    notes = [f"stage {number}: {one.note}" for number, one in enumerate(found) if one.note]
    odd = tuple(member for one in found for member in one.odd)
    return Comparison(all(known) if known else None, "; ".join(notes), odd)


def _of_modules(results: Results) -> Comparison:
    """Return the verdict over modules, each among those that hold it as of its newest round."""
    notes, odd, compared = [], dict[str, None](), False
    modules = {module for result in results.values() for module in result.get("modules") or {}}
    for module in sorted(modules, key=int):
        holds = {m: r for m, r in results.items() if module in (r.get("modules") or {})}
        rounds = {m: r["module_rounds"].get(module, 0) for m, r in holds.items()}
        newest = sorted((m for m in holds if rounds[m] == max(rounds.values())), key=slot_of)
        by: dict[str, list[str]] = defaultdict(list)
        for member in newest:
            by[str(holds[member]["modules"][module])].append(member)
        compared = compared or len(newest) > 1
        most = max(by.values(), key=len)
        if differ := [member for member in newest if member not in most]:
            notes.append(f"module {module} of {', '.join(differ)} differs from that of {most[0]}")
            odd |= dict.fromkeys(differ)
    if not compared:
        return Comparison(None, "not comparable: no module was held by two members at the end")
    return Comparison(not odd, "; ".join(notes), tuple(odd))


def _compare_group(results: Results, group: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return sentences about the members that differ from most of a group, and these members."""
    by: dict[str, list[str]] = defaultdict(list)
    for member in group:
        by[results[member]["digest"]].append(member)
    if len(by) == 1:
        return [], []
    most = max(by.values(), key=len)
    odd = [member for member in group if member not in most]
    notes = []
    for member in odd:
        names = _different(results[most[0]], results[member], "tensors")
        text = f"{member} and {most[0]} differ"
        notes.append(f"{text} in {_some(names)}" if names else text)
    return notes, odd


def _different(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> list[str]:
    left, right = one.get(key) or {}, other.get(key) or {}
    return [name for name in {**left, **right} if left.get(name) != right.get(name)]


def _own(results: Results, members: Sequence[str]) -> str:
    """Return which counts differ, though every tensor that members exchange is equal."""
    first = results[members[0]]
    names = dict.fromkeys(
        name for m in members[1:] for name in _different(first, results[m], "own_tensors")
    )
    return f"each member's own: {_some(list(names))}" if names else ""


def _ended(results: Results, group: Sequence[str]) -> str:
    steps, rounds = _place(results[group[0]])[::-1]
    return f"{' and '.join(group)} ended at step {steps}, round {rounds}"


def _place(result: Mapping[str, Any]) -> tuple[int, int]:
    return result["rounds"], result["steps"]


def _some(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
