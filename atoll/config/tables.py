"""The tables of a job file as frozen dataclasses; every default is here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from atoll.config.constraints import Amount, NotNegative, Positive, PositiveFloat, one_of
from atoll.config.island_tables import IslandTable
from atoll.config.mesh import MeshShape, mesh_of
from atoll.config.rl_tables import RlTable

if TYPE_CHECKING:
    from atoll.methods.method import Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobTable:
    """`[job]`: what runs, where, and on how many machines."""

    name: str = "job"
    """Start of the job's name; a date is added."""
    nodes: Positive = 1
    """How many members train together; `nodes = {min = 2, max = 8}` lets them come and go."""
    min_nodes: int = 0
    """Below so many members the run pauses; 0: all are needed to start, one to go on."""
    seed: int = 7
    """Seed of the model, the data order and everything random."""
    route: Annotated[str, one_of("auto", "direct", "relay")] = "auto"
    """How tensors travel: `auto`, `direct` (torch.distributed) or `relay` (through the hub)."""
    script: str = ""
    """Python file to run instead of the built-in trainer."""
    command: list[str] = dataclasses.field(default_factory=list)
    """Program to run instead of the built-in trainer or a script, e.g. `["bash", "train.sh"]`."""
    args: list[str] = dataclasses.field(default_factory=list)
    """Arguments of the script or the command."""
    code: str = ""
    """Folder beside the job file that travels to the nodes; resolved: `sha256:HEX` of its pack."""
    requirements: str = ""
    """File in `code` that lists packages: nodes build an environment from it, once per content."""
    artifacts: list[str] = dataclasses.field(default_factory=list)
    """Patterns of files, below the folder it works in, that are collected at the hub."""
    queues: list[str] = dataclasses.field(default_factory=list)
    """Queues and topics beyond its own that it may use, e.g. `pool/experience`, and all below."""
    on: list[str] = dataclasses.field(default_factory=list)
    """Nodes that may run it; empty: any."""
    priority: int = 0
    """Among waiting jobs the higher one is placed first; equals in the order of submission."""
    retries: NotNegative = 0
    """How often a process whose program failed is started again before that ends the job."""
    threads: int = 1
    """torch threads per worker; 0 leaves torch's own choice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedsTable:
    """`[needs]`: what one process of the job needs, and may use, of a machine; 0: no matter."""

    cores: Amount = 0.0
    """Processor cores."""
    memory_gb: Amount = 0.0
    """Memory in GB (10^9 bytes)."""
    gpu: str = ""
    """`any`, or part of an accelerator's name, e.g. `H200`."""
    gpu_memory_gb: Amount = 0.0
    """Memory of one accelerator."""
    disk_gb: Amount = 0.0
    """Free disk."""
    bandwidth_mbps: Amount = 0.0
    """Measured megabits per second between the machine and the hub, the slower direction."""
    labels: list[str] = dataclasses.field(default_factory=list)
    """Labels that the machine's owner gave it, all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchTable:
    """`[launch]`: how a process is started on its machine."""

    launcher: Annotated[str, one_of("process", "container")] = "process"
    """`process`, or `container` (Docker or Podman)."""
    image: str = ""
    """Image of the container."""
    pull: Annotated[str, one_of("missing", "always", "never")] = "missing"
    """When the image is pulled: `missing`, `always` or `never`."""
    mounts: list[str] = dataclasses.field(default_factory=list)
    """`HOST:CONTAINER` or `HOST:CONTAINER:ro`; the machine's owner must allow them."""
    network: Annotated[str, one_of("host", "bridge", "none")] = "host"
    """`host`, `bridge` or `none` (a job without network cannot speak to the hub)."""
    env: list[str] = dataclasses.field(default_factory=list)
    """`NAME=VALUE` for its environment."""
    read_only: bool = False
    """The container's own files cannot be changed; its folder and /tmp can."""
    nice: int = 0
    """Niceness of the process; the machine's owner may raise it."""
    signature: str = ""
    """Signature of a pinned image, for owners who accept signed images only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataTable:
    """`[data]`: the text, how it becomes tokens, and how it is dealt out; or the images."""

    corpus: str = "stdlib"
    """`stdlib` (sources of Python's standard library) or `files:GLOB`; for classifiers
    `fashion-mnist`, `idx:FOLDER` or `segments` (drawn digits, nothing to install)."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe:SIZE` (trained on the corpus), or `model`: that of a pretrained model."""
    order: str = "shuffled"
    """`shuffled`: blocks are dealt at random; `contiguous`: each slot gets one stretch of the text,
    or a few classes of images."""
    held_out: float = 0.05
    """Share of the text that no shard contains; images bring their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTable:
    """`[train]`: the inner optimizer and its schedule, per member."""

    steps: Positive = 2000
    """Optimizer steps of each member."""
    batch: Positive = 16
    """Sequences per step and member."""
    optimizer: str = "adamw"
    """`adamw`, `sgd`, `muon` (AdamW for what is no hidden matrix) or `torch:NAME`."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further options of that optimizer, in `[train.options]`, e.g. `eps`, `ns_steps`."""
    lr: PositiveFloat = 4e-3
    """Peak learning rate; Muon wants about five times AdamW's."""
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.95])
    """AdamW's two decay rates."""
    momentum: float = 0.0
    """Momentum of `sgd`."""
    weight_decay: float = 0.1
    """Decoupled weight decay (of matrices only)."""
    clip: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    warmup: int = 50
    """Steps until the peak rate is reached."""
    schedule: str = "cosine"
    """`cosine` or `constant`, after the warm-up."""
    final_lr: float = 0.1
    """Last rate as a share of the peak, for `cosine`."""
    precision: Annotated[str, one_of("fp32", "bf16", "fp16")] = "fp32"
    """What the model computes in: `fp32`, `bf16` or `fp16` (autocast; parameters stay fp32)."""
    accumulate: Positive = 1
    """Parts that each rank's share of a batch is computed in, one after the other."""
    recompute: str = "none"
    """Activations computed again in the backward pass: `none`, `full`, `matmul` (all but matrix
    products) or `every:N` blocks."""
    compile: bool = False
    """Whether the model goes through `torch.compile`."""
    pace: Annotated[str, one_of("measured", "equal")] = "measured"
    """Steps per round: `measured` (slower machines do fewer, all arrive together) or `equal`."""
    eval_every: int = 0
    """Rounds between evaluations on held-out text; 0: about ten in a run."""
    eval_tokens: int = 65_536
    """Held-out tokens of one evaluation during the run (all of them at the end)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointTable:
    """`[checkpoint]`: when the state is saved."""

    every: int = 0
    """Rounds between checkpoints; 0: about eight in a run. A stop always saves one."""
    keep: Positive = 2
    """How many of the newest are kept."""
    keep_every: int = 0
    """Every checkpoint whose round is a multiple of this is kept, too; 0: none."""
    keep_best: int = 0
    """How many with the lowest held-out loss are kept, too."""
    to: str = ""
    """Folder or object store for copies, as an fsspec URL, e.g. `s3://bucket/runs`; empty: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyTable:
    """`[strategy]`: inner x outer x codec; anything left out comes from the preset."""

    preset: str = "diloco"
    """A row of the table of presets, e.g. `diloco`, `local-sgd`, `ddp`, `alone`."""
    inner: str = ""
    """How one optimizer step is computed; empty: the preset's."""
    outer: str = ""
    """How members come to agree; empty: the preset's."""
    codec: str = ""
    """How tensors are encoded, e.g. `fp32`, `int8`, `feedback(int8)`; empty: the preset's."""
    aggregate: str = "mean"
    """How the members' values become one: `mean`, or a robust rule, e.g. `median`, `trimmed:1`."""
    collective: str = "auto"
    """How a mean travels between members that can dial each other, e.g. `ring`, `tree`, `star`."""
    admission: str = "finite"
    """Whose values are let in: `finite` ones, or those within the usual `norms`."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the outer strategy (every, outer_lr, ...): any other key of the table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTable:
    """`[model]`: which model."""

    name: str = "gpt"
    """`gpt`, `gpt2`, `llama`, `resnet`, `vit`, or `transformers`: one of that library."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of that model (layers, width, ...): any other key of the table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A whole job file."""

    job: JobTable = dataclasses.field(default_factory=JobTable)
    needs: NeedsTable = dataclasses.field(default_factory=NeedsTable)
    launch: LaunchTable = dataclasses.field(default_factory=LaunchTable)
    model: ModelTable = dataclasses.field(default_factory=ModelTable)
    data: DataTable = dataclasses.field(default_factory=DataTable)
    train: TrainTable = dataclasses.field(default_factory=TrainTable)
    strategy: StrategyTable = dataclasses.field(default_factory=StrategyTable)
    checkpoint: CheckpointTable = dataclasses.field(default_factory=CheckpointTable)
    island: IslandTable = dataclasses.field(default_factory=IslandTable)
    rl: RlTable = dataclasses.field(default_factory=RlTable)

    @property
    def mesh(self) -> MeshShape:
        """How one member's model lies over its processes."""
        island, inner = self.island, self.strategy.inner
        if self.job.script and not inner and max(island.ranks, len(island.mesh)) > 0:
            inner = "hybrid" if island.mesh else "fsdp"  # a script divides its model by itself
        return mesh_of(inner, ranks=island.ranks, mesh=island.mesh)

    @property
    def alone(self) -> bool:
        """Whether every member trains a model of its own."""
        method = self._method()
        return method is not None and not method.exchanges

    @property
    def served(self) -> bool:
        """Whether its members meet at parameter servers, even if there is one member only."""
        method = self._method()
        return method is not None and method.needs_servers

    def _method(self) -> type[Method] | None:
        # Imported here: 18 dataclasses cost every command 20 ms, and few of them ask.
        from atoll.methods.table import method_named

        return method_named(self.strategy.outer, self.strategy.preset)

    @property
    def kind(self) -> str:
        """What kind of program it is: `trainer`, `rl`, `script`, `command` or `container`."""
        if self.launch.launcher == "container":
            return "container"
        if self.rl.active:
            return "rl"
        if self.job.command:
            return "command"
        return "script" if self.job.script else "trainer"

    @property
    def trust(self) -> str:
        """The kind of job that the owner of a machine has to allow for it.

        Environments that are code of somebody's own may do whatever a script may.
        """
        return "script" if self.kind == "rl" and (self.job.code or self.rl.has_code) else self.kind
