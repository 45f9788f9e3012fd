"""Before rewards begin: a model learns to write examples of the tasks, some of which are wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from atoll.config import TrainTable
from atoll.models import GPT
from atoll.rl.text import seeds
from atoll.rl.text.prompts import END, Wording, padded
from atoll.rl.text.tasks import TextTask
from atoll.train.optimizers import StepSchedule, build_optimizer, learning_rate


def pretrain(
    model: GPT,
    tasks: Sequence[TextTask],
    wording: Wording,
    *,
    table: TrainTable,
    seed: int,
    stopping: Callable[[], bool] = lambda: False,
) -> float:
    """Teach a model examples of all tasks in equal parts, in place; return its last loss.

    Args:
        model: Fresh, or trained on something else.
        tasks: Where examples come from.
        wording: The model's tokens.
        table: `[train]`: steps, batch (of examples), optimizer, rate.
        seed: Of the examples; the same seed gives the same model.
        stopping: Asked before every step; True ends it early.

    Returns:
        Nats per token of the completions, mean over the last steps.
    """
    optimizer = build_optimizer(model, table)
    schedule = StepSchedule(optimizer, learning_rate(table))
    source = seeds.source("examples", seed)
    recent: list[float] = []
    model.train()
    for step in range(table.steps):
        if stopping():
            break
        tokens, targets = _batch(tasks, wording, table.batch, source, model.config.context)
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
    """Return examples [B, L] and what should follow each token; -1 where nothing is asked."""
    rows, targets = [], []
    for number in range(count):
        prompt, completion = tasks[number % len(tasks)].example(source)
        given = wording.tokenizer.encode(prompt.encode()).long()
        asked = wording.tokenizer.encode(completion.encode() + END).long()
        whole = torch.cat((given, asked))[: context + 1]
        following = whole[1:].clone()
        following[: len(given) - 1] = -1
        rows.append(whole[:-1])
        targets.append(following)
    filled = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-1)
    return padded(rows), filled
