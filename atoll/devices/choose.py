"""Choose the device that a process computes on.

A request is `auto`, `cpu`, or the kind of an accelerator with or without an index: `cuda` (also of
ROCm), `cuda:1`, `xpu`, `mps`. `auto` is the accelerator that torch finds, else the processor.
"""

from __future__ import annotations

import torch
from torch import nn

from atoll.config.constraints import AUTO_DEVICE, CPU_DEVICE
from atoll.errors import ConfigError

AUTO, CPU = AUTO_DEVICE, CPU_DEVICE


def accelerator() -> str:
    """Return the kind of the accelerator that torch finds here, e.g. `cuda`; empty: none."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and torch.accelerator.is_available() else ""


def count() -> int:
    """Return the number of accelerators that torch finds here."""
    return torch.accelerator.device_count() if accelerator() else 0


def choose(wanted: str = AUTO, *, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
    """Return the device of a process; accelerators always with their index.

    Args:
        wanted: What the job requests, after what the machine's owner requests.
        local_rank: Number of this process among those of its island on this machine.
        local_ranks: How many those are. All compute on the same kind of device, each on its own:
            with fewer accelerators, `auto` is the processor for all of them.

    Raises:
        ConfigError: the request is not a device, or the accelerator for it is missing.
    """
    if wanted == AUTO:
        return torch.device(CPU) if why_idle(wanted, local_ranks=local_ranks) else _nth(local_rank)
    if wanted == CPU:
        return torch.device(CPU)
    kind, index = _parsed(wanted)
    if kind != accelerator():
        raise ConfigError(
            "this machine has no such accelerator",
            given=f'device = "{wanted}"; {_there()}',
            remedy=f'device = "{AUTO}" takes what is there, "{CPU}" the processor',
        )
    if index is not None and local_ranks > 1:
        raise ConfigError(
            "the ranks of an island need a device each",
            given=f'device = "{wanted}" for {local_ranks} ranks of one machine',
            expected=f'device = "{kind}": the first rank gets {kind}:0, the second {kind}:1',
        )
    place = local_rank if index is None else index
    if place >= count():
        what = f'device = "{wanted}"' if local_ranks == 1 else f"local rank {local_rank}"
        raise ConfigError(
            "there is no accelerator for this rank" if index is None else "no such accelerator",
            given=f"{what}, {count()} accelerators",
            remedy=f'device = "{CPU}", or fewer ranks per machine' if index is None
            else f"a number from 0 to {count() - 1}",
        )  # fmt: skip
    return torch.device(kind, place)


def device_of_model(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the processor if it has none."""
    return next(model.parameters(), torch.empty(0)).device


def why_idle(wanted: str = AUTO, *, local_ranks: int = 1) -> str:
    """Return why a process with this request computes on the processor; empty: it does not.

    A request that `choose` refuses counts as one for an accelerator.
    """
    if wanted == CPU:
        return f'device = "{CPU}" in the job, or in the policy of this machine'
    if wanted != AUTO:
        return ""
    if not accelerator():
        return no_accelerator()
    if count() < local_ranks:
        return f"{local_ranks} ranks and only {count()} accelerators, one is needed for each"
    return ""


def no_accelerator() -> str:
    """Return why torch finds no accelerator; empty: it finds one."""
    if accelerator():
        return ""
    built_for = torch.accelerator.current_accelerator()
    if built_for is not None:
        return f"torch {torch.__version__} is built for {built_for.type} and finds no such device"
    return f"torch {torch.__version__} is built without support for an accelerator"


def _nth(local_rank: int) -> torch.device:
    return torch.device(accelerator(), local_rank)


def _parsed(wanted: str) -> tuple[str, int | None]:
    """Return kind and index of a request."""
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(
            "this is not a device", given=wanted,
            expected=f'"{AUTO}", "{CPU}", or an accelerator: "cuda", "cuda:1", "xpu", "mps"',
        ) from error  # fmt: skip
    return device.type, device.index


def _there() -> str:
    if not accelerator():
        return no_accelerator()
    return f"it has {count()} of kind {accelerator()}"
