"""Each rank's own state in a script's checkpoints: random numbers, data positions, kept objects.

The host model does not contain it: every rank packs its state, and the first one stores all of them
in the member's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.checkpoint.format.memory_image import MemoryImage, part_of
from atoll.checkpoint.format.nested import TREE, flatten, nest
from atoll.checkpoint.format.part import Part
from atoll.checkpoint.state.capture import random_state, set_random_state
from atoll.errors import CheckpointError, ConfigError, DataError
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.train.shares.share import DataShare

GATHER, RESTORE, MOVE = "gather-rank-states", "restore-rank-states", "move-in-the-data"
"""Commands to the ranks: send your state; load it; continue with other data."""
NAME = "rank"
PLACE = ("passes", "offset")
"""Names of a share's position in a cursor, after the share's number."""
ORDER = "order"
"""Name of the digest of the order that it counts in."""


class RankState:
    """One rank's own state; the same calls are made on every rank of an island."""

    def __init__(self) -> None:
        """Keep only random numbers at first."""
        self._shares: list[DataShare] = []
        self._things: dict[str, Any] = {}
        self._came: Mapping[str, Any] = {}
        """State from a checkpoint, also for shares and objects that are not registered yet."""
        self._broadcaster: CommandBroadcaster | None = None
        self._slot: int | None = None
        """The data slot, once it was leased."""
        self._cursor: dict[str, int] = {}
        """Its positions in shares that are not registered yet."""

    def follow(self, broadcaster: CommandBroadcaster) -> None:
        """Handle the commands of the first rank."""
        self._broadcaster = broadcaster
        broadcaster.on(GATHER, self._gather)
        broadcaster.on(RESTORE, self._deal)
        broadcaster.on(MOVE, self._move)

    # ------------------------------------------------------------------- what there is to keep

    def share(self, share: DataShare) -> None:
        """Keep the position in a data share; shares are identified by the order of these calls."""
        number = len(self._shares)
        self._shares.append(share)
        places = self._came.get("places", [])
        if number < len(places) and places[number] is not None:
            share.resume(places[number])
        if self._slot is not None:
            self._cursor.pop(f"{number}.{ORDER}", None)
            passes, offset = (self._cursor.pop(f"{number}.{name}", 0) for name in PLACE)
            share.go_to(self._slot, passes=passes, offset=offset)

    def thing(self, name: str, thing: Any) -> None:
        """Keep anything with `state_dict` and `load_state_dict`.

        Raises:
            ConfigError: it has no such methods, or the name is taken.
            CheckpointError: what a checkpoint has under this name does not fit it.
        """
        lacks = [m for m in ("state_dict", "load_state_dict") if not hasattr(thing, m)]
        if lacks or name in self._things:
            raise ConfigError(
                f"{name!r} cannot be kept in checkpoints",
                given=f"{type(thing).__name__} without {' and '.join(lacks)}"
                if lacks else "a second object with that name",
                expected="state_dict() and load_state_dict(state), and a unique name",
            )  # fmt: skip
        self._things[name] = thing
        if name in self._came.get("things", {}):
            _load(name, thing, self._came["things"][name])

    # ----------------------------------------------------------------- rounds: the data slot

    def place_after(self, steps: int) -> tuple[int, dict[str, int]] | None:
        """Return None: how far a script will have read by then is not known."""
        return None

    def place(self) -> tuple[int, dict[str, int]] | None:
        """Return the data slot and the positions in the shares that are trained on.

        The sums of their passes and offsets are what the hub compares.
        """
        cursor = dict(self._cursor)
        for number, share in enumerate(self._shares):
            if share.in_training:
                cursor |= {f"{number}.passes": share.passes, f"{number}.offset": share.offset}
                if share.digest is not None:
                    cursor[f"{number}.{ORDER}"] = share.digest
        if not cursor:
            return None
        sums = [
            sum(value for name, value in cursor.items() if name.endswith(f".{part}"))
            for part in PLACE
        ]
        slot = self._slot if self._slot is not None else self._shares[0].slot
        return slot, {"data_pass": sums[0], "offset": sums[1], **cursor}

    def check_orders(self, leases: Mapping[int, Mapping[str, int]]) -> None:
        """Check that members deal out the same order; `leases` are those of a committed round.

        Raises:
            DataError: another member's sampler drew another order for the same pass.
        """
        for number, share in enumerate(self._shares):
            for slot, cursor in leases.items():
                theirs = cursor.get(f"{number}.{ORDER}", share.digest)
                same_pass = cursor.get(f"{number}.passes") == share.passes
                if same_pass and share.in_training and theirs != share.digest:
                    raise DataError(
                        "the members' samplers draw different orders, so samples would be missed "
                        "and repeated",
                        given=f"pass {share.passes}, this member and the reader of slot {slot}",
                        expected="the same order on every member",
                        remedy="seed what the order depends on, e.g. with run.seed",
                    )

    @property
    def samples_given(self) -> int:
        """Samples that training has read."""
        return sum(share.samples_given for share in self._shares if share.in_training)

    def account(self, leases: Mapping[int, Mapping[str, int]]) -> list[dict[str, list[int]]]:
        """Return per share and slot the committed passes and offset, and the slot's samples."""
        found: list[dict[str, list[int]]] = []
        for number, share in enumerate(self._shares):
            found.append({})
            for slot, cursor in leases.items():
                size = share.size(slot) if share.in_training else None
                if size:
                    place = [cursor.get(f"{number}.{name}", 0) for name in PLACE]
                    found[-1][str(slot)] = [*place, size]
        return found

    def move(self, slot: int, cursor: Mapping[str, int]) -> None:
        """Continue with a data slot from a position, on all ranks; called on the first one."""
        if self.place() == (slot, dict(cursor)):
            return
        if self._broadcaster is None:
            self._move(slot, dict(cursor))
        else:
            self._broadcaster.call(MOVE, slot=slot, cursor=dict(cursor))

    def _move(self, slot: int, cursor: dict[str, int]) -> None:
        places = {name: value for name, value in cursor.items() if "." in name}
        self._slot = slot
        for number, share in enumerate(self._shares):
            places.pop(f"{number}.{ORDER}", None)
            passes, offset = (places.pop(f"{number}.{name}", 0) for name in PLACE)
            if share.in_training or not share.begun:  # an evaluation keeps its own share
                share.go_to(slot, passes=passes, offset=offset)
        self._cursor = places

    # -------------------------------------------------------------------------- on the first rank

    def gather(self) -> list[dict[str, Any]]:
        """Return the states of all ranks, in order; call it from the training thread.

        Raises:
            CheckpointError: a kept object has a state that cannot be saved.
        """
        if self._broadcaster is None:
            return [self._state()]
        found: list[dict[str, Any]] = self._broadcaster.call(GATHER)
        return found

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the result of `gather` on all ranks; ranks beyond it keep their state.

        Raises:
            CheckpointError: a state does not fit a kept object.
        """
        if self._broadcaster is None:
            if states:
                self._take_up(states[0])
        elif states:
            self._broadcaster.call(RESTORE, [_packed(state) for state in states])

    # ---------------------------------------------------------------------------- on every rank

    def _state(self) -> dict[str, Any]:
        return {
            "random": random_state(),
            "places": [share.place() if share.in_training else None for share in self._shares],
            "things": {name: thing.state_dict() for name, thing in self._things.items()},
        }

    def _take_up(self, state: Mapping[str, Any]) -> None:
        self._came = state
        for share, place in zip(self._shares, state["places"], strict=False):
            if place is not None:
                share.resume(place)
        for name, thing in self._things.items():
            if name in state["things"]:
                _load(name, thing, state["things"][name])
        set_random_state(state["random"])

    def _gather(self) -> list[dict[str, Any]]:
        broadcaster, own = self._broadcaster, _packed(self._state())
        if broadcaster is None:
            return []
        sizes = broadcaster.gather(torch.tensor([own.numel()])).flatten().tolist()
        row = torch.zeros(max(sizes), dtype=torch.uint8)
        row[: own.numel()] = own
        rows = broadcaster.gather(row)
        if not broadcaster.leads:
            return []
        return [_unpacked(each[:size]) for each, size in zip(rows, sizes, strict=True)]

    def _deal(self, *packed: Tensor) -> None:
        if self._broadcaster is not None and self._broadcaster.rank < len(packed):
            self._take_up(_unpacked(packed[self._broadcaster.rank]))


def _load(name: str, thing: Any, state: Any) -> None:
    try:
        thing.load_state_dict(state)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's state of {name!r} does not fit",
            given=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            expected=f"the state of a {type(thing).__name__}",
            remedy="resume with the script it was written with",
        ) from error


def _packed(state: Mapping[str, Any]) -> Tensor:
    tensors, tree = flatten(state, prefix=NAME)
    image = MemoryImage(Part(NAME, tensors, {TREE: tree}))
    return torch.frombuffer(bytearray(image.view), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> dict[str, Any]:
    part = part_of(bytearray(packed.numpy().tobytes()), NAME)
    return dict(nest(part.metadata[TREE], part.tensors))
