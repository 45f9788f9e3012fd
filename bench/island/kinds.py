"""The kinds of parallelism that are compared, and the model they are compared on."""

from __future__ import annotations

from dataclasses import dataclass, field

LR, CLIP = 1e-3, 1.0
BATCH, CONTEXT = 16, 128
MODEL = {"layers": 4, "width": 256, "heads": 4, "context": CONTEXT, "tie": False}


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table."""

    name: str
    inner: str
    mesh: dict[str, int] = field(default_factory=dict)
    schedule: str = "1f1b"
    microbatches: int = 0
    chunks: int = 1

    @property
    def ranks(self) -> int:
        """Processes."""
        found = 1
        for size in self.mesh.values():
            found *= size
        return found


KINDS = (
    Kind("ddp", "ddp", {"replicate": 2}),
    Kind("fsdp", "fsdp", {"shard": 2}),
    Kind("tensor", "tensor", {"tensor": 2}),
    Kind("pipeline, gpipe", "pipeline", {"pipeline": 2}, schedule="gpipe", microbatches=4),
    Kind("pipeline, 1f1b", "pipeline", {"pipeline": 2}, microbatches=4),
    Kind(
        "pipeline, interleaved", "pipeline", {"pipeline": 2}, schedule="interleaved",
        microbatches=4, chunks=2,
    ),
    Kind("shard x tensor", "hybrid", {"shard": 2, "tensor": 2}),
    Kind("replicate x shard", "hybrid", {"replicate": 2, "shard": 2}),
)  # fmt: skip
