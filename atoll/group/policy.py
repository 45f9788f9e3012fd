"""What a group does with the members' values beyond averaging them; equal on every member."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """How values become one, how they travel between members that can dial each other."""

    aggregate: str = "mean"
    """The rule that makes one vector of the members': `mean`, or a robust one."""
    collective: str = "auto"
    """How a mean travels on the direct route: `auto`, or the name of a collective."""
    admission: str = "finite"
    """Which contributions are let in: `finite` ones, or those that pass a filter."""
