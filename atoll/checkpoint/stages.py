"""The state of one stage of a model, without torch.distributed: for checkpoints and for donors.

The format is that of `sharded.py`: the file of stage s stands where rank s would write its pieces,
under the names of the whole model. So one process, any mesh and any other number of stages loads
what a SWARM saved, and a SWARM loads what they saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from atoll.checkpoint.format.part import Part
from atoll.checkpoint.format.pieces import PIECES, Pieces
from atoll.checkpoint.format.weights import MODEL_PREFIX
from atoll.checkpoint.state.same_model import check_same_model, check_same_optimizer
from atoll.checkpoint.state.sharded_state import OPTIMIZER_PREFIX, Trained
from atoll.task import real_numel
from atoll.wire.manifest import piece_file

OUTER_PREFIX = "outer."
OLDER_PREFIX = "older/"
"""Of weights as they were one step before, on which a part of the next step is computed."""


class OuterNames:
    """Names of an outer method's tensors in the file of a stage, for any other number of stages.

    outer.<key>/<parameter or buffer>     its part of a vector over all of them
    outer.<key>//<stage>                  anything else, which every stage has
    """

    def __init__(self, stage: int, tensors: Mapping[str, Tensor]) -> None:
        """Name a stage's `tensors` in the order in which its vectors hold them."""
        self._own = f"//{stage}"
        self._sizes = {name: real_numel(tensor) for name, tensor in tensors.items()}

    def named(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state under these names; nothing is copied."""
        found: dict[str, Tensor] = {}
        for key, vector in state.items():
            places = self._places(vector.numel()) if vector.dim() == 1 else {}
            for name, (start, size) in places.items():
                found[f"{OUTER_PREFIX}{key}/{name}"] = vector[start : start + size]
            if not places:
                found[f"{OUTER_PREFIX}{key}{self._own}"] = vector
        return found

    def state_in(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state that files hold for this stage; other tensors are left alone."""
        pieces: dict[str, dict[str, Tensor]] = {}
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            key, _, rest = name.removeprefix(OUTER_PREFIX).partition("/")
            if not name.startswith(OUTER_PREFIX):
                continue
            if rest.startswith("/"):  # those of all stages are alike
                if key not in found or f"/{rest}" == self._own:
                    found[key] = tensor
            else:
                pieces.setdefault(key, {})[rest] = tensor
        for key, held in pieces.items():
            own = [name for name in self._sizes if name in held]
            if own and self._places(sum(self._sizes[name] for name in own)):
                found[key] = torch.cat([held[name].reshape(-1) for name in own])
        return found

    def _places(self, numel: int) -> dict[str, tuple[int, int]]:
        """Return start and size of each tensor in a vector over the first; empty: it is not one."""
        found: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in self._sizes.items():
            if start == numel:
                break
            found[name] = start, size
            start += size
        return found if start == numel and numel > 1 else {}


def stage_part(
    trained: Trained,
    stage: int,
    *,
    texts: Mapping[str, str] | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> Part:
    """Return model and optimizer of a stage as the file of a checkpoint; nothing is copied.

    `texts` and `more` are added to it, e.g. the state of an outer method.

    Raises:
        CheckpointError: its optimizer is not over this stage.
    """
    tensors = {**trained.model_tensors(), **trained.optimizer_tensors(), **(more or {})}
    pieces = {name: [[0] * tensor.dim(), list(tensor.shape)] for name, tensor in tensors.items()}
    metadata = {**trained.texts(), PIECES: json.dumps(pieces), **(texts or {})}
    return Part(piece_file(stage), tensors, metadata)


def load_stage(trained: Trained, parts: Iterable[Part]) -> None:
    """Fill a stage with its tensors out of these parts, and give the optimizer its state.

    Raises:
        CheckpointError: the parts are of another model or optimizer; names and shapes are in the
            message.
        CheckpointCorrupt: a part is no part of such a checkpoint.
    """
    wanted = trained.model_tensors()
    pieces = Pieces.of_parts(_only(part, wanted) for part in parts)
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    check_same_model(pieces, shapes, partly=True)
    check_same_optimizer(pieces, trained)
    room = trained.room_for({name: (cut.size, cut.dtype) for name, cut in pieces.cuts.items()})
    with torch.no_grad():
        for name, target in {**wanted, **room}.items():
            pieces.cuts[name].fill(target)
    trained.take_up(room, pieces.texts)


def parts_with(
    model_tensors: Collection[str], files: Iterable[str], read: Callable[[str], Part], *, stage: int
) -> Iterator[Part]:
    """Yield what the files of a checkpoint hold of these tensors, one file after the other.

    The file of stage `stage` is read first. No file is read once all tensors are there: with the
    same cuts it is the only one, and no member fetches the whole model.
    """
    own, lacking = piece_file(stage), set(model_tensors)
    for name in sorted(files, key=lambda name: name != own):
        part = read(name)
        kept = {n: t for n, t in part.tensors.items() if concerns(n, model_tensors)}
        if kept:
            yield Part(name, kept, part.metadata)
        pieces = json.loads(part.metadata.get(PIECES, "{}"))
        lacking -= {n for n, t in kept.items() if list(t.shape) == pieces.get(n, [0, 0])[1]}
        if not lacking:
            return


def concerns(name: str, model_tensors: Collection[str]) -> bool:
    """Return whether a tensor of a checkpoint belongs to these: itself, or state over them."""
    if name.startswith(OUTER_PREFIX):
        rest = name.partition("/")[2]
        return rest.startswith("/") or MODEL_PREFIX + rest in model_tensors
    if name.startswith(OLDER_PREFIX):
        return MODEL_PREFIX + name.removeprefix(OLDER_PREFIX) in model_tensors
    if name.startswith(OPTIMIZER_PREFIX):
        name = MODEL_PREFIX + name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")[0]
    return name in model_tensors


def _only(part: Part, wanted: Mapping[str, Tensor]) -> Part:
    kept = {
        name: tensor
        for name, tensor in part.tensors.items()
        if concerns(name, wanted) and not name.startswith(OUTER_PREFIX)
    }
    return Part(part.name, kept, part.metadata)
