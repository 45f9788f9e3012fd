"""What can be checked of a model in a pipeline without data, ranks or memory for its weights."""

from __future__ import annotations

from torch import nn

from atoll.strategies.inner.options import (
    ActivationFormat,
    InnerOptions,
    PipelineShape,
    check_axes,
    check_microbatches,
)
from atoll.strategies.inner.pipeline.activations import activation_codec
from atoll.strategies.inner.pipeline.cuts import check_cuts, check_stages, check_ties, cuts_by_size
from atoll.strategies.inner.pipeline.stages import chain_of, cut_up, names_of, shared
from atoll.strategies.inner.pipeline.subspace import check_confined


def check_pipeline(model: nn.Module, options: InnerOptions) -> None:
    """Check that a model, which may be on the meta device, can be cut and sent as options say.

    Raises:
        ConfigError: it cannot; the message names the nearest options that can.
    """
    shape = PipelineShape(options.schedule, options.shape.pipeline, options.chunks)
    check_axes(options)
    form = ActivationFormat.of(options.activations)
    if form.size:
        check_confined(model, form.size)
    if form.codec:
        activation_codec(form.codec)
    units = chain_of(model)[0]
    check_stages(len(units), shape)
    if options.microbatches:
        check_microbatches(shape, options.microbatches)
    # Measured cuts will differ, but the units that share weights are the first and the last.
    cuts = cuts_by_size(units, stages=shape.stages)
    if options.cuts:
        cuts = check_cuts(options.cuts, units=len(units), stages=shape.stages)
    check_ties(shared(cut_up(units, cuts), names_of(model)), shape)
