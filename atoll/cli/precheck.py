"""Finds wrong names in a job before anything is started for it."""

from __future__ import annotations

from atoll.config import JobSpec
from atoll.node.probe import torch_version


def check_names(spec: JobSpec) -> None:
    """Refuse names and options that no machine will know.

    What needs torch is checked only where torch is installed; the workers check all of it again.

    Raises:
        ConfigError: a strategy, an option, a codec or a model is unknown; the nearest is named.
    """
    if spec.job.script:
        return
    from atoll.strategies.table import build_outer, resolve

    resolved = resolve(spec.strategy)
    if not torch_version():
        return
    import torch

    from atoll.codec.table import make_codec
    from atoll.models import build_model

    make_codec(resolved.codec)
    build_outer(resolved)
    with torch.device("meta"):  # shapes only: costs neither time nor memory
        build_model(spec.model.name, **spec.model.options)
