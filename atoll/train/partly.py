"""A job's model of which only one stage has values, for members that cannot hold the whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.config import JobSpec
from atoll.data import TrainingData
from atoll.models import CausalLMConfig
from atoll.models.partial import NotPartly, Partly, Survey, build_partly, tensors_in, tensors_of
from atoll.models.pretrained import read_weights, weight_files
from atoll.strategies.inner.pipeline.stages import chain_of, cut_up
from atoll.strategies.inner.pipeline.subspace import check_confined
from atoll.strategies.inner.swarm.stage import StageCut, cuts_of
from atoll.train.build import complete_table, whole_model

log = logging.getLogger(__name__)

_TRAINED = "_parameters", "_modules"
"""Attributes of a module that hold what its units hold: parameters and submodules."""

GUESSED = (
    "the order of its layers is a guess, which is checked by running it: give it a method units()"
)


def stage_model(spec: JobSpec, dataset: TrainingData, stage: int, cut: StageCut) -> Partly:
    """Return a job's model with the initial values of one stage, as `whole_model` has them.

    Raises:
        ConfigError: the model is unknown, its options are wrong, or it cannot be cut like that.
        DataError: a pretrained model is missing.
    """

    def wanted(model: Any) -> Iterator[Tensor]:
        return tensors_of_stage(model, stage, cut)

    if not _source(spec):
        new = build_partly(lambda: whole_model(spec, dataset, complete=False), wanted)
        complete_table(spec, new.model)
        return new
    try:
        files = _files(spec)
        found = build_partly(lambda: whole_model(spec, dataset, complete=False), wanted)
        _fill(found.model, list(wanted(found.model)), files)
    except NotPartly as error:
        log.warning("the whole model is built in main memory: %s", error)
        return Partly(whole_model(spec, dataset), str(error))
    return found


def building_bytes(
    spec: JobSpec, dataset: TrainingData | None, cut: StageCut, *, whole_bytes: int
) -> tuple[str, list[int]]:
    """Return the most memory that building each stage takes; nothing is allocated.

    The first value says why a member builds the whole model (`whole_bytes`); empty: it does not.
    """
    source = _source(spec)
    try:
        if source:
            _files(spec)
        with torch.random.fork_rng(devices=[]):
            survey = Survey.of(lambda: whole_model(spec, dataset, complete=False))
        wanted = [tensors_of_stage(survey.model, stage, cut) for stage in range(cut.stages)]
        return "", [survey.peak_bytes(tensors) for tensors in wanted]
    except NotPartly as error:
        return str(error), [whole_bytes] * cut.stages


def _source(spec: JobSpec) -> bool:
    """Return whether the weights of a job's model are in files."""
    return spec.model.name == "transformers" and bool(spec.model.options.get("source"))


def _files(spec: JobSpec) -> Mapping[str, Path]:
    """Return the files of a pretrained model's weights, by name; raises NotPartly."""
    files = weight_files(CausalLMConfig(**spec.model.options))
    if files is None:
        raise NotPartly("its weights are not in a folder with safetensors files")
    return files


@torch.no_grad()
def _fill(model: nn.Module, wanted: Sequence[Tensor], files: Mapping[str, Path]) -> None:
    """Load the wanted tensors of a model; raises NotPartly if one is not in the files."""
    ours = {id(tensor) for tensor in wanted}
    saved = model.state_dict(keep_vars=True)
    own = {name: tensor for name, tensor in saved.items() if id(tensor) in ours}
    missing = [name for name in own if name not in files]
    if missing:
        raise NotPartly(f"its files have no {missing[0]}")
    for name, tensor in read_weights(files, own):
        if tensor.shape != own[name].shape:
            raise NotPartly(f"{name} has another shape in its files")
        own[name].copy_(tensor)


def tensors_of_stage(model: Any, stage: int, cut: StageCut) -> Iterator[Tensor]:
    """Yield the tensors of a model that a member of a stage needs.

    Raises:
        NotPartly: the stage cannot be determined without the values of the whole model.
        ConfigError: the model cannot be cut like that.
    """
    units, sure = chain_of(model)
    if not sure:
        raise NotPartly(GUESSED)
    yield from tensors_of(cut_up(units, cuts_of(model, cut))[stage])
    if cut.size:  # the subspace follows from the embedding, on all stages
        stream = check_confined(model, cut.size)
        yield model.get_parameter(f"{stream.embedding}.weight")
    # What the criterion may use: see `criterion_alone`.
    yield from tensors_in(v for name, v in vars(model).items() if name not in _TRAINED)
    bare = [child for child in model.children() if next(child.parameters(), None) is None]
    yield from tensors_of(bare)
