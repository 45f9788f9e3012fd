"""Changes of a record's fields: checked, and undone where they are not stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from atoll.errors import unknown


@contextmanager
def restored_on_error(target: Any, names: Iterable[str]) -> Iterator[None]:
    """Set these fields of a record back if the block raises, e.g. because it was not saved."""
    before = {name: getattr(target, name) for name in names}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(target, name, value)
        raise


def change_fields(target: Any, changes: dict[str, Any], known: frozenset[str]) -> None:
    """Set fields of a record; an unknown name raises and changes nothing."""
    for name in changes:
        if name not in known:
            raise unknown(f"field of a {type(target).__name__.lower()}", name, known)
    for name, value in changes.items():
        setattr(target, name, value)
