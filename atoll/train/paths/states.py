"""Where a member gets modules from, and where it saves them: other members, or the hub."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from atoll.checkpoint import Part, Saved, SavePoint
from atoll.checkpoint.format.part import STATE
from atoll.checkpoint.format.pieces import PIECES
from atoll.errors import CheckpointError, PeerLost
from atoll.recovery import StateOf
from atoll.recovery.snapshot_cache import Still
from atoll.train.swarm.states import FETCH_S, HubStates
from atoll.wire.manifest import ABOUT, HISTORY, piece_file


class ModuleStates(Protocol):
    """Brings the states of modules, and gives the own ones to others."""

    def donated(
        self, number: int, donors: Sequence[str], *, serves: Mapping[str, Sequence[str]]
    ) -> Mapping[str, Tensor]:
        """Return a module from its holders; `number` is what `HeldModules.number_of` returns.

        Raises:
            GroupError: none of them has it.
        """
        ...

    def saved(self, round_: int, module: int) -> Mapping[str, Tensor]:
        """Return a module as a checkpoint has it.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        ...

    def offer_several(self, find: Callable[[int], StateOf], *, still: Still, images: int) -> None:
        """Give modules to members that ask for them, see :meth:`StateServer.offer_several`."""
        ...

    def save(self, parts: Sequence[Part], *, round_: int, final: bool) -> bool:
        """Save modules for a checkpoint; return whether they were copied, or if `final` written."""
        ...


@dataclass(frozen=True, slots=True)
class JobModules(HubStates):
    """The states of the modules of a job at a hub."""

    def donated(
        self, number: int, donors: Sequence[str], *, serves: Mapping[str, Sequence[str]]
    ) -> Mapping[str, Tensor]:
        """Fetch from all donors at once."""
        gone = PeerLost("no member gives this module", given=", ".join(donors))
        return self.fetch(number, donors, serves, gone=gone).tensors

    def offer_several(self, find: Callable[[int], StateOf], *, still: Still, images: int) -> None:
        """Serve modules over the member's server."""
        self.server.offer_several(find, still=still, images=images)

    def saved(self, round_: int, module: int) -> Mapping[str, Tensor]:
        """Download the module's file."""
        name = piece_file(module)
        with contextlib.closing(self.store()) as store:
            part = store.get(round_, names=[name])[name]
        if part.metadata.get(MODULE) != str(module):
            raise CheckpointError(
                "this checkpoint is not one of a model with paths",
                given=f"{name} of round {round_}", expected=f"the file of module {module}",
                remedy="resume it with the strategy that saved it",
            )  # fmt: skip
        return part.tensors

    def save(self, parts: Sequence[Part], *, round_: int, final: bool) -> bool:
        """Copy the parts, and upload them in the background; wait for that if it is the `final`."""
        me = self.recipient.me
        point = SavePoint(round_, round_, me, [me])
        copied = isinstance(self.saver.save(point, parts, final=final), Saved)
        return copied and (not final or self.saver.wait(FETCH_S))


MODULE = "module"
"""Key in the metadata of a module's file: its number."""


def module_part(
    module: int, tensors: Mapping[str, Tensor], *, history: int, about: str = ""
) -> Part:
    """Return a module as its file of a checkpoint; nothing is copied.

    `about` is that of the whole checkpoint, in the file of module 0.
    """
    pieces = {name: [[0] * tensor.dim(), list(tensor.shape)] for name, tensor in tensors.items()}
    texts = {
        PIECES: json.dumps(pieces), MODULE: str(module), HISTORY: str(history), STATE: str(history),
    }  # fmt: skip
    return Part(piece_file(module), dict(tensors), texts | ({ABOUT: about} if about else {}))
