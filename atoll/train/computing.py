"""Where and in which precision a member of the built-in trainer computes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed

from atoll.config import JobSpec, least_step_s
from atoll.devices.choose import why_idle
from atoll.devices.facts import name_of
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.precision import AUTO, precision_on

dist: Any = torch.distributed
log = logging.getLogger(__name__)


def options_on(spec: JobSpec, device: torch.device, *, island: bool = False) -> InnerOptions:
    """Return a job's options on a device, and log what computes, and why no accelerator does.

    Collective if `island`: with `auto`, all ranks take bf16 only if each of them supports it.
    """
    options = InnerOptions.of(spec)
    precision = precision_on(options.precision, device)
    if island and options.precision == AUTO:
        fits = torch.tensor(float(precision == "bf16"))
        dist.all_reduce(fits, op=dist.ReduceOp.MIN)
        precision = "bf16" if fits else "fp32"
    options = replace(options, precision=precision, least_step_s=least_step_s())
    idle = why_idle(spec.job.device) if device.type == "cpu" else ""
    log.info(
        "computes on %s (%s) in %s%s", device, name_of(device), options.precision,
        f": {idle}" if idle else "",
    )  # fmt: skip
    return options
