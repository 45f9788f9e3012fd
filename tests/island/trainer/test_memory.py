"""What `atoll plan memory` predicts is what real ranks hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.config import JobSpec, parse_spec
from atoll.island.world import build_mesh
from atoll.plan.memory import plan_memory, sample, sizes_of
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.gather_scatter import local_of
from atoll.strategies.inner.sharded_optimizer import LocalShard
from atoll.train.build import whole_model
from atoll.train.computing import options_on
from atoll.train.optim.optimizers import build_optimizer
from tests.island.pool import Ranks

TEXT = 'corpus = "files:{folder}/*.txt"'
IMAGES = 'corpus = "segments"'
GPT = '[model]\nname = "gpt"\nlayers = 3\nwidth = 24\nheads = 4\ncontext = 16\n'
"""No size divides by four ranks but the number of heads: shards are padded."""

JOBS = {
    "ddp": GPT + '[strategy]\ninner = "ddp"\n[island]\nranks = 2\n',
    "fsdp": GPT + '[strategy]\ninner = "fsdp"\n[island]\nranks = 4\n',
    "hsdp": GPT + '[strategy]\ninner = "hybrid"\n[island]\nmesh = {{ replicate = 2, shard = 2 }}\n',
    "tensor": GPT + '[strategy]\ninner = "tensor"\n[island]\nranks = 2\n',
    "pipeline": GPT + '[strategy]\ninner = "pipeline"\n[island]\nranks = 2\n',
    "square": GPT + '[strategy]\ninner = "hybrid"\n[island]\nmesh = {{ shard = 2, tensor = 2 }}\n',
    "stages": GPT
    + '[strategy]\ninner = "hybrid"\n[island]\nmesh = {{ shard = 2, pipeline = 2 }}\ncuts = [2]\n',
    "momentum": GPT
    + '[strategy]\ninner = "fsdp"\n[island]\nranks = 2\n'
    + '[train]\noptimizer = "sgd"\nmomentum = 0.9\n',
    "muon": GPT + '[strategy]\ninner = "ddp"\n[island]\nranks = 2\n[train]\noptimizer = "muon"\n',
    "transformers": '[model]\nname = "transformers"\ncontext = 16\n[model.config]\n'
    + 'model_type = "llama"\nhidden_size = 16\nintermediate_size = 40\nnum_hidden_layers = 2\n'
    + "num_attention_heads = 2\nnum_key_value_heads = 2\ntie_word_embeddings = true\n"
    + '[strategy]\ninner = "hybrid"\n[island]\nmesh = {{ shard = 2, tensor = 2 }}\n',
    "images": '[model]\nname = "resnet"\n[strategy]\ninner = "fsdp"\n[island]\nranks = 2\n',
}


def job(name: str, folder: Path) -> JobSpec:
    """Return a job of the table, with a text of its own."""
    text = JOBS[name].format(folder=folder)
    corpus = IMAGES if name == "images" else TEXT.format(folder=folder)
    train = "batch = 8" if "[train]" in text else "[train]\nbatch = 8"
    return parse_spec(f"{text}{train}\n[data]\n{corpus}\n")


def held(tensors: Iterable[Tensor]) -> int:
    """Return the memory behind tensors, what several share once."""
    storages = {
        local_of(t).untyped_storage()._cdata: local_of(t).untyped_storage() for t in tensors
    }
    return sum(storage.nbytes() for storage in storages.values())


def _measured(spec: JobSpec) -> dict[str, int]:
    options = options_on(spec, torch.device("cpu"))
    model: Any = whole_model(spec)
    inputs, targets = sample(sizes_of(spec), model, rows=spec.train.batch)
    optimizer = build_optimizer(model, spec.train)
    names = {p: name for name, p in model.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    device = torch.device("cpu")
    parts = split_model(
        model, options, mesh=build_mesh(options.shape, device=device), device=device
    )
    own = LocalShard(optimizer, parts.parameters(), groups=groups, state={})
    for _ in range(2):  # buckets are arranged anew after the first pass
        parts.backward(inputs, targets)
    found = {"gradients": held(own.gradients().values())}
    own.step()
    found["parameters"] = held(parts.parameters().values())
    states = (v for state in own.optimizer.state.values() for v in state.values())
    found["optimizer"] = held(v for v in states if isinstance(v, Tensor))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a little text."""
    found = tmp_path_factory.mktemp("text")
    (found / "a.txt").write_text("All work and no play. " * 400, encoding="utf-8")
    return found


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.every(4)
def test_static_memory_of_every_rank_is_predicted_to_the_byte(
    ranks: Ranks, folder: Path, name: str
) -> None:
    spec = job(name, folder)
    plan = plan_memory(spec)
    for rank, measured in zip(plan.ranks, ranks.run(spec.mesh.ranks, _measured, spec), strict=True):
        for part, nbytes in measured.items():
            assert getattr(rank, part) == nbytes, (rank.rank, part)
