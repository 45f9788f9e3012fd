"""Islands on one machine: a rank on the device's own backend, and more ranks than accelerators."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from atoll.config.rank_environment import RankPlace
from atoll.devices.choose import CPU, accelerator, count
from atoll.devices.runtime import BACKENDS, backend
from atoll.errors import ConfigError
from atoll.island.world import device_of
from bench.island.kinds import Kind
from bench.island.rank import compare
from bench.kit.ranks import on_ranks

dist: Any = torch.distributed
REFUSED_S = 40.0


def measure(*, quick: bool) -> dict[str, Any]:
    """Return the step of an island of one rank, and what an island of one rank too many gets."""
    kind, pairs, segment_s = Kind("one rank", "fsdp"), 3 if quick else 11, 0.3
    ranks = max(1, count()) + 1
    found: dict[str, Any] = {
        "one_rank": on_ranks(compare, kind, pairs, segment_s, "auto", ranks=1)[0],
        "one_too_many": on_ranks(offered, ranks=ranks)[-1],
    }
    if accelerator() in BACKENDS:
        found["two_on_one"] = on_ranks(both_on_the_first, ranks=2)[0]
    return found


def offered(place: RankPlace) -> dict[str, str]:
    """Return the devices that a rank gets for `auto` and for the name of an accelerator."""
    found = {"auto": str(device_of(place, wanted="auto"))}
    kind = accelerator()
    if kind:
        try:
            found[kind] = str(device_of(place, wanted=kind))
        except ConfigError as error:
            found[kind] = str(error)
    return {**found, "backend": backend(torch.device(found["auto"].partition(":")[0] or CPU))}


def both_on_the_first(place: RankPlace) -> str:
    """Return what the device's backend says to two ranks on one accelerator."""
    device = torch.device(accelerator(), 0)
    dist.init_process_group(
        backend=backend(device), init_method=f"tcp://{place.dial}", rank=place.rank,
        world_size=place.ranks, timeout=timedelta(seconds=REFUSED_S),
    )  # fmt: skip
    try:
        dist.all_reduce(torch.ones(1, device=device))
        torch.accelerator.synchronize()
    except RuntimeError as error:
        return " ".join(str(error).split())[-300:]
    return "accepted"
