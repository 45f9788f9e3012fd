"""Where and in which precision a member of the built-in trainer computes."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from atoll.config import JobSpec
from atoll.devices.choose import why_idle
from atoll.devices.facts import name_of
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.precision import precision_on

log = logging.getLogger(__name__)


def options_on(spec: JobSpec, device: torch.device) -> InnerOptions:
    """Return a job's options on a device, and log what computes, and why no accelerator does."""
    options = InnerOptions.of(spec)
    options = replace(options, precision=precision_on(options.precision, device))
    idle = why_idle(spec.job.device) if device.type == "cpu" else ""
    log.info(
        "computes on %s (%s) in %s%s", device, name_of(device), options.precision,
        f": {idle}" if idle else "",
    )  # fmt: skip
    return options
