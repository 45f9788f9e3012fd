"""Models and measures of the tests of tensor parallelism; everything here runs on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.config.mesh import MeshShape
from atoll.island.world import build_mesh
from atoll.models import build_model
from atoll.strategies.inner.gradient_norm import complete
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.tensor.tensor import apply_tensor

WIDTH, LENGTH, ROWS, TOKENS, LAYERS = 16, 8, 4, 32, 2
SIZES = {"layers": LAYERS, "width": WIDTH, "heads": 4, "context": LENGTH, "vocab_size": TOKENS}


class Wrapped(nn.Module):
    """A causal language model of `transformers` with the methods of this project's own."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=ids, use_cache=False).logits
        return logits

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Perceptron(nn.Module):
    """Two layers with something random in between: a user's own model."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 24)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(24, WIDTH)
        self.after = nn.Dropout(dropout)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.after(self.second(self.dropout(functional.relu(self.first(x)))))
        return functional.log_softmax(self.last(x), -1)

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.nll_loss(outputs, targets)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how it is split."""

    kind: str = "gpt"
    options: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, int] = field(default_factory=lambda: {"tensor": 2})
    recipe: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    @property
    def ranks(self) -> int:
        return MeshShape(**self.shape).ranks


def make(case: Case) -> tuple[Any, Tensor, Tensor]:
    """The same model with random weights everywhere, inputs and targets, on every rank."""
    torch.manual_seed(3)
    model: Any
    if case.kind in {"LlamaForCausalLM", "Qwen3ForCausalLM"}:
        model = Wrapped(_of_transformers(case))
    elif case.kind == "perceptron":
        model = Perceptron(**case.options)
    else:
        language = case.kind != "vit"
        sizes = SIZES if language else {"layers": 2, "width": WIDTH, "image": 8, "patch": 2}
        model = build_model(case.kind, **{**sizes, **case.options})
    model = model.to(case.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    some = torch.Generator().manual_seed(5)
    if case.kind == "vit":
        images = torch.randn(ROWS, 1, 8, 8, generator=some, dtype=case.dtype)
        return model, images, torch.randint(0, 10, (ROWS,), generator=some)
    if case.kind == "perceptron":
        vectors = torch.randn(ROWS, WIDTH, generator=some, dtype=case.dtype)
        return model, vectors, torch.randint(0, 5, (ROWS,), generator=some)
    ids = torch.randint(0, TOKENS, (ROWS, LENGTH + 1), generator=some)
    return model, ids[:, :-1], ids[:, 1:]


def _of_transformers(case: Case) -> Any:
    import transformers

    config: Any = {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 24, "head_dim": 4,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH, **case.options,
    }  # fmt: skip
    library: Any = transformers
    kind = getattr(library, case.kind)
    return kind(kind.config_class(**config))


def whole(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
    return found.detach()


def split(case: Case, model: Any) -> DeviceMesh:
    """Split a model as `divide` does; return the mesh."""
    shape = MeshShape(**case.shape)
    mesh = build_mesh(shape, device=torch.device("cpu"))
    apply_tensor(model, model, mesh["tensor"], InnerOptions(shape=shape, **case.recipe))
    if shape.shard > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    return mesh


@dataclass
class Found:
    """What a rank has computed."""

    loss: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)
    elements: Mapping[str, int] = field(default_factory=dict)


def alone(case: Case) -> Found:
    """One forward and backward pass without any split."""
    model, inputs, targets = make(case)
    loss = model.criterion(model(inputs), targets)
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return Found(loss.item(), gradients, {n: whole(p) for n, p in model.named_parameters()})


def together(case: Case) -> Found:
    """The same pass over the ranks; the gradients put together. What was sent is counted."""
    model, inputs, targets = make(case)
    mesh = split(case, model)
    shards, shard = mesh["shard"].size(), mesh.get_local_rank("shard")
    inputs, targets = (t.chunk(shards)[shard] for t in (inputs, targets))
    with Collectives() as forward:
        loss = model.criterion(model(inputs), targets)
    with Collectives() as backward:
        loss.backward()
    complete(model.parameters())
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    parameters = {name: whole(p) for name, p in model.named_parameters()}
    elements = forward.elements + backward.elements
    return Found(loss.item(), gradients, parameters, forward.counts, backward.counts, elements)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what ranks send each other; elements and bytes are those of the whole result."""

    NAMES: Mapping[str, str] = {
        "all_reduce": "sum", "allreduce": "sum", "all_gather_into_tensor": "gather",
        "_allgather_base": "gather", "reduce_scatter_tensor": "scatter",
        "_reduce_scatter_base": "scatter",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space in {"c10d", "_c10d_functional"} and name.rstrip("_") in self.NAMES:
            what = self.NAMES[name.rstrip("_")]
            self.counts[what] += 1
            sent = found if what == "gather" else args[0]
            while isinstance(sent, list | tuple):
                sent = sent[0]
            self.elements[what] += sent.numel()
            self.sent_bytes += sent.numel() * sent.element_size()
        return found


def family(kind: str, **changes: object) -> dict[str, object]:
    """Return the configuration of a small model of `transformers` of some kind."""
    return {
        "model_type": kind, "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        **changes,
    }  # fmt: skip
