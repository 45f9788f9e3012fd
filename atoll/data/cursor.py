"""The position in a data stream, small enough to be saved and sent to another member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from atoll.errors import DataError


@dataclass(frozen=True, slots=True)
class Cursor:
    """The state of a :class:`~atoll.data.BatchStream`, from which any member can continue.

    Attributes:
        slot: Index of the shard.
        data_pass: Complete passes over the shard.
        offset: Windows (not batches, so the batch size may change) used in this pass.
    """

    slot: int
    data_pass: int = 0
    offset: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return plain numbers for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Cursor:
        """Restore a cursor from :meth:`to_dict`; raises DataError."""
        names = {field.name for field in fields(cls)}
        numbers = {
            name: value
            for name, value in values.items()
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0
        }
        if set(values) != names or set(numbers) != names:
            raise DataError(
                "this is not a position in the data",
                given=repr(dict(values)),
                expected="slot, data_pass and offset, whole numbers of 0 or more",
                remedy="the checkpoint comes from another version; start from its weights alone",
            )
        return cls(**numbers)
