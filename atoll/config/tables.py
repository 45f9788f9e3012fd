"""The tables of a job file as frozen dataclasses with all defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from atoll.config.constraints import (
    Amount,
    DeviceSetting,
    NotNegative,
    NotNegativeFloat,
    Positive,
    PositiveFloat,
    Share,
    one_of,
)
from atoll.config.dipaco_tables import DiPaCoTable
from atoll.config.harmless_variables import is_harmless
from atoll.config.island_tables import IslandTable
from atoll.config.log_table import LogTable
from atoll.config.mesh import MeshShape, mesh_of
from atoll.config.rl_tables import RlTable
from atoll.config.swarm_tables import LOCAL, SwarmTable
from atoll.config.tune_tables import TuneTable

if TYPE_CHECKING:
    from atoll.methods.method import Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobTable:
    """`[job]`: what runs, and on how many machines."""

    name: str = "job"
    """Prefix of the job's id; a date is added."""
    nodes: Positive = 1
    """Number of members; `nodes = {min = 2, max = 8}` makes the job elastic."""
    min_nodes: int = 0
    """The run pauses below this number; 0: all are needed to start, one to continue."""
    quorum: Share = 0.0
    """Share of the members whose joins suffice for a round; the others are waited for only as long
    as that costs less than their work. 0: rounds wait for all."""
    seed: int = 7
    """Seed of model, data order and all other randomness."""
    route: Annotated[str, one_of("auto", "direct", "relay")] = "auto"
    """Route of tensors: `auto`, `direct` (between members) or `relay` (through the hub)."""
    planned: list[str] = dataclasses.field(default_factory=list)
    """Keys of `[strategy]` that the hub plans again when members or their lines change by more than
    20 %: `every`, `collective`. `atoll run` adds those that it has planned."""
    encryption: Annotated[str, one_of("on", "off")] = "on"
    """Of data that members send each other directly; `off` only on a network that you trust."""
    script: str = ""
    """Python file to run instead of the built-in trainer."""
    command: list[str] = dataclasses.field(default_factory=list)
    """Program to run instead of the built-in trainer or a script, e.g. `["bash", "train.sh"]`."""
    args: list[str] = dataclasses.field(default_factory=list)
    """Arguments of the script or the command."""
    code: str = ""
    """Folder next to the job file sent to the nodes; once resolved: `sha256:HEX` of its pack."""
    requirements: str = ""
    """File in `code` that lists packages; nodes build one environment per content."""
    artifacts: list[str] = dataclasses.field(default_factory=list)
    """Patterns of files in its working folder to collect at the hub."""
    queues: list[str] = dataclasses.field(default_factory=list)
    """Further queues and topics that it may use, e.g. `pool/experience`, and all below."""
    on: list[str] = dataclasses.field(default_factory=list)
    """Nodes that may run it; empty: any."""
    priority: int = 0
    """Waiting jobs are placed by descending priority, then in order of submission."""
    retries: NotNegative = 0
    """Restarts of a failed process before the job fails."""
    threads: int = 1
    """torch threads per worker; 0: torch's default."""
    trust: Annotated[str, one_of("members", "audit")] = "members"
    """`audit`: others compute some rounds of each member again; a member that cheats is evicted."""
    audit_share: float = 0.02
    """Share of all member-rounds that are drawn for that by chance, 0.01 to 0.05."""
    device: DeviceSetting = "auto"
    """Device: `auto` (the accelerator that is there, else the processor), `cpu`, `cuda` (also of
    ROCm), `cuda:1`, `xpu` or `mps`. The owner of a machine may keep its accelerator."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedsTable:
    """`[needs]`: resources of one process of the job; 0: no requirement."""

    cores: Amount = 0.0
    memory_gb: Amount = 0.0
    """Memory in GB (10^9 bytes)."""
    gpu: str = ""
    """`any`, or a part of the accelerator's name, e.g. `H200`."""
    gpu_memory_gb: Amount = 0.0
    """Memory of one accelerator."""
    disk_gb: Amount = 0.0
    """Free disk."""
    bandwidth_mbps: Amount = 0.0
    """Measured megabits per second between node and hub, in the slower direction."""
    labels: list[str] = dataclasses.field(default_factory=list)
    """Labels that the node must all have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchTable:
    """`[launch]`: how a process is started on its node."""

    launcher: Annotated[str, one_of("process", "container")] = "process"
    """`process`, or `container` (Docker or Podman)."""
    image: str = ""
    """Image of the container."""
    pull: Annotated[str, one_of("missing", "always", "never")] = "missing"
    """When to pull the image: `missing`, `always` or `never`."""
    mounts: list[str] = dataclasses.field(default_factory=list)
    """`HOST:CONTAINER` or `HOST:CONTAINER:ro`; the machine's owner must allow them."""
    network: Annotated[str, one_of("host", "bridge", "none")] = "host"
    """`host`, `bridge` or `none` (which cannot reach the hub)."""
    env: list[str] = dataclasses.field(default_factory=list)
    """Environment variables, `NAME=VALUE`; `NAME=secret:SECRET` is one of `secrets`."""
    secrets: list[str] = dataclasses.field(default_factory=list)
    """Secrets of the hub (`atoll secret set`) as environment variables: `NAME`, or `VARIABLE=NAME`.
    """
    read_only: bool = False
    """Make the container's file system read-only, except its folder and /tmp."""
    nice: int = 0
    """Niceness of the process; the owner may raise it."""
    signature: str = ""
    """Signature of a pinned image or of the job's code, for owners that require it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataTable:
    """`[data]`: the text, its tokenizer and its distribution; or the images."""

    corpus: str = "stdlib"
    """`stdlib` (sources of Python's standard library) or `files:GLOB`; for classifiers
    `folder:FOLDER`, `shards:GLOB`, `fashion-mnist`, `idx:FOLDER` or `segments` (generated digits).
    """
    tokenizer: str = "bytes"
    """`bytes`, `bpe:SIZE` (trained on the corpus), or `model` (that of a pretrained model)."""
    order: str = "shuffled"
    """`shuffled`: random blocks; `contiguous`: one stretch of the text, or a few classes, per slot.
    """
    held_out: float = 0.05
    """Held-out share of the text; image sets have their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTable:
    """`[train]`: the inner optimizer and its schedule, per member."""

    steps: Positive = 2000
    """Optimizer steps of each member."""
    batch: Positive = 16
    """Sequences per step and member."""
    optimizer: str = "adamw"
    """`adamw`, `sgd`, `muon` (AdamW for everything except hidden matrices) or `torch:NAME`."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further options of the optimizer in `[train.options]`, e.g. `eps`, `ns_steps`."""
    lr: PositiveFloat = 4e-3
    """Peak learning rate; Muon needs about five times AdamW's."""
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.95])
    """AdamW's two decay rates."""
    momentum: float = 0.0
    """Momentum of `sgd`."""
    weight_decay: float = 0.1
    """Decoupled weight decay, of matrices only."""
    clip: float = 1.0
    """Maximum gradient norm; 0: no clipping."""
    warmup: int = 50
    """Steps until the peak learning rate."""
    schedule: str = "cosine"
    """`cosine` or `constant`, after the warm-up."""
    final_lr: float = 0.1
    """Final learning rate of `cosine` as a share of the peak."""
    precision: Annotated[str, one_of("auto", "fp32", "bf16", "fp16")] = "auto"
    """Compute type: `fp32`, `bf16` or `fp16` (autocast; parameters stay fp32); `auto`: `bf16` on an
    accelerator that has it, else `fp32`."""
    accumulate: Positive = 1
    """Gradient accumulation steps per batch."""
    recompute: str = "none"
    """Activation recomputation: `none`, `full`, `matmul` (all but matrix products) or `every:N`
    blocks.
    """
    compile: bool = False
    """Use `torch.compile`."""
    pace: Annotated[str, one_of("measured", "equal")] = "measured"
    """Steps per round: `measured` (fewer on slower nodes, so that all finish together) or `equal`.
    """
    eval_every: int = 0
    """Rounds between evaluations on held-out data; 0: about ten in a run."""
    eval_tokens: int = 65_536
    """Held-out tokens per evaluation during the run; the final one uses all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointTable:
    """`[checkpoint]`: when the state is saved, and what is kept."""

    every: int = 0
    """Rounds between checkpoints; 0: about eight in a run, in a script one every `every_s`.
    Stopping always saves one."""
    every_s: NotNegativeFloat = 300.0
    """Seconds between checkpoints of a script with `every = 0`; 0: it saves none. A pause is longer
    where a checkpoint takes more than a tenth of it."""
    keep: Positive = 2
    """Number of newest checkpoints kept."""
    keep_every: int = 0
    """Also keep checkpoints of rounds that are a multiple of this; 0: none."""
    keep_best: int = 0
    """Also keep this many with the lowest held-out loss."""
    to: str = ""
    """Folder or object store for copies, as an fsspec URL, e.g. `s3://bucket/runs`; empty: none."""
    to_options: list[str] = dataclasses.field(default_factory=list)
    """Options of its driver, `NAME=VALUE`, e.g. `key=secret:S3_KEY` (`atoll secret set S3_KEY`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyTable:
    """`[strategy]`: inner x outer x codec; defaults come from the preset."""

    preset: str = "diloco"
    """Name of a preset, e.g. `diloco`, `local-sgd`, `ddp`, `alone`."""
    inner: str = ""
    """How one optimizer step is computed; empty: the preset's."""
    outer: str = ""
    """How members combine their models; empty: the preset's."""
    codec: str = ""
    """Encoding of tensors, e.g. `fp32`, `int8`, `feedback(int8)`; empty: the preset's."""
    aggregate: str = "mean"
    """Aggregation rule: `mean`, or a robust rule, e.g. `median`, `trimmed:1`."""
    collective: str = "auto"
    """Collective of the direct route, e.g. `ring`, `tree`, `star`."""
    admission: str = "finite"
    """Accepted contributions: `finite` ones, or those with a usual norm (`norms`)."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the outer strategy (every, outer_lr, ...): all other keys of the table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTable:
    """`[model]`: which model."""

    name: str = "gpt"
    """`gpt`, `gpt2`, `llama`, `resnet`, `vit`, `transformers` (a model of that library), or
    `module:factory` of the job's own code."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the model (layers, width, ...): all other keys of the table."""


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
    swarm: SwarmTable = dataclasses.field(default_factory=SwarmTable)
    dipaco: DiPaCoTable = dataclasses.field(default_factory=DiPaCoTable)
    tune: TuneTable = dataclasses.field(default_factory=TuneTable)
    log: LogTable = dataclasses.field(default_factory=LogTable)
    rl: RlTable = dataclasses.field(default_factory=RlTable)

    @property
    def mesh(self) -> MeshShape:
        """Mesh of one member's model over its processes; of a SWARM's, see `member_spec`."""
        island, inner = self.island, self.strategy.inner
        if inner == "swarm" and self.swarm.whole_inner != LOCAL:
            return MeshShape()
        if self.job.script and not inner and max(island.ranks, len(island.mesh)) > 0:
            inner = "hybrid" if island.mesh else "fsdp"  # a script divides its model itself
        return mesh_of(inner, ranks=island.ranks, mesh=island.mesh)

    @property
    def alone(self) -> bool:
        """Whether every member trains its own model."""
        method = self._method()
        return method is not None and not method.exchanges

    @property
    def parts_saved(self) -> int:
        """Parts of the model that its members save apart: stages or modules; 0: it is whole."""
        return self.swarm.stages or sum(self.dipaco.modules)

    @property
    def served(self) -> bool:
        """Whether its members use parameter servers, even if there is only one member."""
        method = self._method()
        return method is not None and method.needs_servers

    @property
    def meets_every_step(self) -> bool:
        """Whether members combine the gradients of every step."""
        method = self._method()
        return method is not None and method().uses_gradients

    @property
    def planned_again(self) -> list[str]:
        """The keys of `planned` that can change while this job runs."""
        if self.kind != "trainer" or self.job.trust == "audit":
            return []
        if self.swarm.stages or self.dipaco.modules:
            return []
        method, table = self._method(), self.strategy
        may = {
            "every": method is not None and method.interval_may_change,
            "collective": table.aggregate == "mean" and "auto" not in table.codec,
            "codec": "auto" in table.codec,
            "delay": str(table.options.get("delay", "")).startswith("auto"),
        }
        return [key for key in self.job.planned if may.get(key)]

    def _method(self) -> type[Method] | None:
        # Imported lazily: 18 dataclasses cost every command 20 ms, and few need them.
        from atoll.methods.table import method_named

        return method_named(self.strategy.outer, self.strategy.preset)

    @property
    def kind(self) -> str:
        """Kind of program: `trainer`, `rl`, `script`, `command` or `container`."""
        if self.launch.launcher == "container":
            return "container"
        if self.rl.active:
            return "rl"
        if self.job.command:
            return "command"
        return "script" if self.job.script else "trainer"

    @property
    def saves_every_s(self) -> float:
        """Seconds between checkpoints that the hub asks for; 0: it asks for none."""
        own_schedule = self.kind in ("trainer", "rl") or self.checkpoint.every > 0
        return 0.0 if own_schedule else self.checkpoint.every_s

    @property
    def permission(self) -> str:
        """Kind of job that the owner must allow.

        Code of the job counts as a script; so do environment variables that can load code.
        """
        own = self.kind == "rl" and (self.job.code or self.rl.has_code)
        own = own or (self.kind == "trainer" and (self.job.code or ":" in self.model.name))
        lines = [*self.launch.env, *self.launch.secrets]
        names = (line.partition("=")[0] for line in lines)
        own = own or (self.kind in ("trainer", "rl") and not all(map(is_harmless, names)))
        return "script" if own else self.kind
