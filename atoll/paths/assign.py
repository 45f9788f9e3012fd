"""Which member trains which paths; a pure function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from atoll.ids import slot_of
from atoll.paths.layout import PathLayout


def assign(
    layout: PathLayout,
    paths: Collection[int],
    members: Collection[str],
    *,
    before: Mapping[str, Sequence[int]],
    holds: Mapping[str, Collection[int]],
) -> dict[str, list[int]]:
    """Assign `paths` to members, so that no member has two more than another.

    A path stays with the member that had it `before`, as far as that is even: its optimizer's
    state is there. Others go to the member with the fewest paths, among these to the one that
    already `holds` most of its modules.

    Returns:
        The paths of each member, ascending; of members without one an empty list.
    """
    order = sorted(members, key=slot_of)
    if not order:
        return {}
    least, more = divmod(len(paths), len(order))
    dealt: dict[str, list[int]] = {}
    for member in order:  # the first members in slot order may have one path more
        kept = [path for path in sorted(before.get(member, ())) if path in paths]
        room = least + (more > 0)
        dealt[member] = kept[:room]
        more -= len(dealt[member]) > least
    free = sorted(set(paths) - {path for kept in dealt.values() for path in kept})
    for path in free:
        wanted = set(layout.modules_of(path))

        def rank(member: str, wanted: set[int] = wanted) -> tuple[int, int, int]:
            held = {*holds.get(member, ()), *layout.modules_in(dealt[member])}
            return len(dealt[member]), -len(wanted & held), slot_of(member)

        dealt[min(order, key=rank)].append(path)
    return {member: sorted(found) for member, found in dealt.items()}
