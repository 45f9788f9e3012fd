"""`[island]`: several processes that are one member of a job, and how a model lies over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from atoll.config.constraints import Positive, PositiveFloat, one_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandTable:
    """`[island]`: the processes of one member; with `ranks = 0` and no mesh it is one process."""

    ranks: int = 0
    """Processes of a member; 0: as many as `mesh` says."""
    mesh: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """How many ranks each axis has, e.g. `{replicate = 2, tensor = 2}`; `[strategy] inner` with one
    axis needs none."""
    machines: Positive = 1
    """Over how many machines of one network an island goes; its ranks are dealt out evenly, in
    runs. Each takes a place of a node of its own; [needs] are those of one machine."""
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"
    """`cpu`, `cuda`, or `auto`: an accelerator per rank where a machine has enough of them."""
    on_loss: Annotated[str, one_of("wait", "shrink")] = "wait"
    """When a rank dies: `wait` until as many are there again, or `shrink` to those that remain."""
    schedule: Annotated[str, one_of("gpipe", "1f1b", "interleaved")] = "1f1b"
    """Order of a pipeline's work: `gpipe`, `1f1b` or `interleaved`."""
    microbatches: int = 0
    """Parts that a pipeline cuts a batch into; 0: twice as many as it has stages, if that fits."""
    chunks: Positive = 1
    """Stages per rank of an interleaved pipeline."""
    cuts: list[int] = dataclasses.field(default_factory=list)
    """Units before which a pipeline is cut; empty: balanced by a short profile."""
    reshard: bool = True
    """Whether `fsdp` gives gathered parameters back after the forward pass."""
    offload: bool = False
    """Whether `fsdp` keeps its shards in main memory."""
    sequence: bool = False
    """Whether what tensor parallelism does not split is split along the sequence."""
    vocabulary: bool = True
    """Whether tensor parallelism splits embedding, output layer and loss by vocabulary."""
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """A tensor-parallel plan of your own: pattern of module names -> `column` or `row`."""
    memory: str = "ram"
    """Where the first rank keeps what it needs in rounds only, the picture of the whole model and
    what the outer strategy remembers: `ram`, or `disk`, in files mapped into memory."""
    timeout_s: PositiveFloat = 300.0
    """How long ranks wait for each other in one step before they give up."""
