"""Paths by the trainer itself: members on threads, with the real ledger and its rounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.checkpoint import describe, save_weights
from atoll.config import parse_spec
from atoll.data.assignment import Assignment
from atoll.models import GPT
from atoll.routing.evaluate import LoadPath
from bench.dipaco.training import Setting
from tests.train.paths.kit import run_paths

JOB = """
[job]
nodes = {workers}
seed = {seed}
[model]
name = "gpt"
layers = {model.layers}
width = {model.width}
heads = {model.heads}
context = {model.context}
tie = false
[data]
corpus = "{data.corpus}"
held_out = {data.held_out}
[train]
steps = {setting.steps}
batch = {setting.batch}
lr = {setting.lr}
warmup = 0
final_lr = 0.05
eval_every = 100000
eval_tokens = 256
[strategy]
preset = "dipaco"
codec = "fp32"
every = {setting.inner_steps}
outer_lr = {setting.outer_lr}
outer_momentum = {setting.outer_momentum}
[dipaco]
modules = {modules}
assignment = "{folder}/assignment.safetensors"
start = "{folder}/start.safetensors"
held_out = 0.0
"""


@dataclass(frozen=True)
class Data:
    """The text of a job."""

    corpus: str
    held_out: float


def train_members(
    setting: Setting, data: Data, shards: Assignment, folder: Path, *, start: GPT,
    modules: tuple[int, ...], workers: int, seed: int,
) -> LoadPath:  # fmt: skip
    """Train the paths of a shard each; return what loads their models."""
    shards.write(folder / "assignment.safetensors", about={})
    about = describe("gpt", options=asdict(setting.model), tokenizer="bytes")
    save_weights(folder / "start.safetensors", start.state_dict(), about=about)
    spec = parse_spec(
        JOB.format(
            workers=workers, seed=seed, setting=setting, model=setting.model, data=data,
            modules=list(modules), folder=folder,
        )
    )  # fmt: skip
    weights = run_paths(spec, folder, members=workers).weights
    model = GPT(setting.model)

    def load(path: int) -> GPT:
        model.load_state_dict(weights[path])
        return model

    return load
