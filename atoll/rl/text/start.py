"""The start model: the initial weights of policies, their reference and the value model.

Before rewards begin, one member trains it on examples of the tasks, some of which are wrong; the
others read it from a topic.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from atoll.config import JobSpec, TrainTable
from atoll.data import PretrainedTokenizer, make_tokenizer
from atoll.errors import ConfigError
from atoll.models import GPT, build_model
from atoll.models.causal_lm import CausalLM
from atoll.queues import Entry, Subscription, Topic
from atoll.rl import seeds
from atoll.rl.algorithms.trained_policy import IN_MAIN_MEMORY
from atoll.rl.channel.latest import WAIT_S as POLL_S
from atoll.rl.channel.messages import decode_snapshot, encode_snapshot
from atoll.rl.seeds import seed_for
from atoll.rl.state_saver import load_module
from atoll.rl.text.prompts import END, Wording, padded
from atoll.rl.text.sampler import TextModel
from atoll.rl.text.tasks import TextTask, make_task
from atoll.train.build import model_tokenizer
from atoll.train.optim.optimizers import StepSchedule, build_optimizer, learning_rate
from atoll.train.results.sample import load_model

LIBRARY = "transformers"
"""Name of models of that library in [model]."""


def pretrain(
    model: TextModel,
    tasks: Sequence[TextTask],
    wording: Wording,
    *,
    table: TrainTable,
    seed: int,
    stopping: Callable[[], bool] = lambda: False,
) -> float:
    """Train a model on examples of all tasks in equal parts, in place; return its last loss.

    Args:
        model: A fresh or trained model.
        tasks: The tasks that make the examples.
        wording: The model's tokens.
        table: `[train]`: steps, batch (of examples), optimizer, rate.
        seed: Seed of the examples; the same seed gives the same model.
        stopping: Polled before every step; True ends training early.

    Returns:
        Nats per token of the completions, mean over the last steps.
    """
    device = next(model.parameters()).device
    optimizer = build_optimizer(model, table)
    schedule = StepSchedule(optimizer, learning_rate(table))
    source = seeds.source("examples", seed)
    recent: list[float] = []
    model.train()
    for step in range(table.steps):
        if stopping():
            break
        tokens, targets = (
            part.to(device)
            for part in _batch(tasks, wording, table.batch, source, model.config.context)
        )
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if table.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), table.clip)
        optimizer.step()
        schedule.step()
        if step >= table.steps - 20:
            recent.append(loss.item())
    model.eval()
    return sum(recent) / max(1, len(recent))


def _batch(
    tasks: Sequence[TextTask], wording: Wording, count: int, source: random.Random, context: int
) -> tuple[Tensor, Tensor]:
    """Return examples [B, L] and the next token at each position; -1 where it is not trained."""
    rows, targets = [], []
    for number in range(count):
        prompt, completion = tasks[number % len(tasks)].example(source)
        prompt_ids = wording.tokenizer.encode(prompt.encode()).long()
        completion_ids = wording.tokenizer.encode(completion.encode() + END).long()
        whole = torch.cat((prompt_ids, completion_ids))[: context + 1]
        following = whole[1:].clone()
        following[: len(prompt_ids) - 1] = -1
        rows.append(whole[:-1])
        targets.append(following)
    filled = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-1)
    return padded(rows), filled


@dataclass(frozen=True, slots=True)
class StartModel:
    """What every member of a job for language models builds alike."""

    tasks: dict[str, TextTask]
    """By policy."""
    wording: Wording
    model: TextModel
    trained: bool
    """Whether the model was trained before, elsewhere."""


def start_model(spec: JobSpec) -> StartModel:
    """Return tasks, tokens and the model of a job; without `start` the model is fresh.

    Raises:
        ConfigError: a task, or the model, cannot be made.
        CheckpointMissing: the file named by `start` does not exist.
        CheckpointCorrupt: it is damaged.
    """
    rl = spec.rl
    tasks = {policy.name: make_task(policy.env, policy.options) for policy in rl.policies}
    if rl.start:
        model, tokenizer = load_model(Path(rl.start).expanduser())
        if not isinstance(model, GPT):
            raise ConfigError(
                "only the built-in GPT can learn from rewards",
                given=f"start = {rl.start!r}, a {type(model).__name__}",
                expected="weights of the model gpt",
            )
        return StartModel(tasks, Wording(tokenizer), model, trained=True)
    if spec.model.name == LIBRARY:
        return _published(spec, tasks)
    tokenizer = make_tokenizer("bytes")
    with torch.random.fork_rng(devices=[]):  # the layers draw from torch's global generator
        torch.manual_seed(seed_for(spec.job.seed, "weights"))
        model = cast(
            GPT,
            build_model(spec.model.name, vocab_size=tokenizer.vocab_size, **spec.model.options),
        )
    return StartModel(tasks, Wording(tokenizer), model.eval(), trained=False)


def _published(spec: JobSpec, tasks: dict[str, TextTask]) -> StartModel:
    """Return a model of `transformers` as it was published, with new adapters if it has any."""
    tokenizer = PretrainedTokenizer(model_tokenizer(spec).backend_tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(spec.job.seed, "weights"))
        model = cast(
            CausalLM,
            build_model(spec.model.name, vocab_size=tokenizer.vocab_size, **spec.model.options),
        )
    size = int(model.library_model.config.vocab_size)
    return StartModel(tasks, Wording(tokenizer, size=size), model.eval(), trained=True)


def train_start_model(
    beginning: StartModel, spec: JobSpec, *, stopping: Callable[[], bool] = lambda: False
) -> float:
    """Train a fresh model on examples of all tasks, in place; return its last loss.

    `[train]` sets `steps`, `batch` (examples) and `lr`. Everything depends on the seed, so any
    member gets the same model.
    """
    return pretrain(
        beginning.model, list(beginning.tasks.values()), beginning.wording,
        table=spec.train, seed=spec.job.seed, stopping=stopping,
    )  # fmt: skip


log = logging.getLogger(__name__)

TOPIC = "start"

WAIT_S = 300.0
"""After this wait a member trains the start model itself: the seed makes it the same."""


class TopicProvider(Protocol):
    """The part of a run that is needed here."""

    @property
    def slot(self) -> int:
        """Own number."""
        ...

    @property
    def member(self) -> str:
        """Own name."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether the job, or this process, was asked to stop."""
        ...

    def topic(self, name: str, **options: Any) -> Topic:
        """Return a topic of the job."""
        ...


def shared_start_model(
    spec: JobSpec, run: TopicProvider, *, wait_s: float = WAIT_S,
    device: torch.device = IN_MAIN_MEMORY,
) -> StartModel | None:  # fmt: skip
    """Return the start model of all members on a device; None if a stop was requested meanwhile.

    The member in slot 0 trains it, unless an earlier process has, or `start` in `[rl]` names one.

    Raises:
        ConfigError: a task, or the model, cannot be made.
        CheckpointError: the weights that `start` names cannot be used.
    """
    beginning = start_model(spec)
    beginning.model.to(device)
    if beginning.trained:
        return beginning
    topic = run.topic(TOPIC, max_items=1)
    reader = topic.subscribe(f"{run.member}.{TOPIC}", start="oldest")
    entry = reader.newest() if run.slot == 0 else _awaited(reader, run, wait_s)
    if entry is not None:
        _load(beginning, decode_snapshot(entry.value))
        return beginning
    if not run.stopping:
        loss = train_start_model(beginning, spec, stopping=lambda: run.stopping)
        log.info("trained on examples: %.3f nats per token", loss)
    if run.stopping:
        return None
    topic.publish(encode_snapshot(beginning.model.state_dict()))
    return beginning


def _awaited(reader: Subscription, run: TopicProvider, wait_s: float) -> Entry | None:
    """Wait for the start model; short requests, so that a stop ends the wait soon."""
    deadline = time.monotonic() + wait_s
    entry = None
    while entry is None and not run.stopping and (left_s := deadline - time.monotonic()) > 0:
        entry = reader.newest(wait_s=min(left_s, POLL_S))
    return entry


def _load(beginning: StartModel, tensors: Mapping[str, Tensor]) -> None:
    load_module(beginning.model, tensors, what="the model that all start from")
