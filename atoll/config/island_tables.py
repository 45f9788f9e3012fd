"""`[island]`: several processes that form one member, and the mesh of the model over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from atoll.config.constraints import NotNegative, Positive, PositiveFloat, one_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandTable:
    """`[island]`: the processes of one member; one process with `ranks = 0` and no mesh."""

    ranks: int = 0
    """Processes of a member; 0: given by `mesh`."""
    mesh: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Ranks per axis, e.g. `{replicate = 2, tensor = 2}`; not needed if `[strategy] inner` has one
    axis.
    """
    machines: Positive = 1
    """Machines of one network that an island spans, with equally many consecutive ranks. Each takes
    a place of its own on a node; [needs] are those of one machine.
    """
    encryption: Annotated[str, one_of("on", "off")] = "on"
    """`off`: the machines of an island share a network that you trust. torch's collectives cannot
    be encrypted, so that `machines` above 1 needs it.
    """
    on_loss: Annotated[str, one_of("wait", "shrink")] = "wait"
    """When a rank dies: `wait` until it is replaced, or `shrink` to the remaining ones."""
    elastic: bool = False
    """Whether a planner chooses stages and replicas of a pipeline, at every start for the machines
    that are left.
    """
    schedule: Annotated[str, one_of("gpipe", "1f1b", "opportunistic", "interleaved", "async")] = (
        "1f1b"
    )
    """Pipeline schedule: `gpipe`, `1f1b`, `opportunistic` (1f1b that does not wait while it could
    work; on processors), `interleaved`, or `async`, which is not flushed between batches.
    """
    activations: str = "none"
    """Format of activations and their gradients between stages: `none` (as computed), `subspace:K`
    (K numbers per token), a codec, e.g. `int8`, or `subspace:K|int8`.
    """
    refresh: NotNegative = 0
    """Steps after which the subspace of `activations` is turned towards the gradients that it
    drops; 0: never.
    """
    microbatches: int = 0
    """Parts of a batch in a pipeline; 0: twice the number of stages (`async`: four times), if that
    fits.
    """
    chunks: Positive = 1
    """Stages per rank of an interleaved pipeline."""
    cuts: list[int] = dataclasses.field(default_factory=list)
    """Units before which a pipeline is cut; empty: balanced by a short profile."""
    reshard: bool = True
    """Whether `fsdp` frees gathered parameters after the forward pass."""
    offload: bool = False
    """Whether `fsdp` keeps its shards in main memory."""
    sequence: bool = False
    """Whether the parts without tensor parallelism are split along the sequence."""
    vocabulary: bool = True
    """Whether tensor parallelism splits embedding, output layer and loss by vocabulary."""
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Custom tensor-parallel plan: pattern of module names -> `column` or `row`."""
    memory: str = "ram"
    """Where the first rank keeps state used in rounds only (whole model, outer strategy): `ram`, or
    `disk` in memory-mapped files.
    """
    timeout_s: PositiveFloat = 300.0
    """How long ranks wait for each other in one step."""

    @property
    def may_shrink(self) -> bool:
        """Whether an island that has worked starts again with fewer ranks or machines."""
        return self.on_loss == "shrink" or self.elastic
