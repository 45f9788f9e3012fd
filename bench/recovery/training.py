"""The training that both sides do: one model, one loop, one kind of notes.

Everything here needs torch alone, so that the loop is the same line by line whatever keeps the
replicas together. Every step is stretched to the same length: three processes on two cores then
have time to spare, and what a fault costs is not hidden by the cores.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, CONTEXT, BATCH = 256, 256, 8, 32, 1
INNER_LR, OUTER_LR, OUTER_MOMENTUM = 4e-4, 0.7, 0.9


class Notes:
    """Appends what happens in this process to a file, a JSON object per line.

    Times are those of the monotonic clock, which all processes of a machine share.
    """

    def __init__(self, folder: Path, member: str) -> None:
        """Open the file; its name says whose and which process."""
        process = psutil.Process()
        age_s = time.time() - process.create_time()
        self._file = (folder / f"{member}-{process.pid}.jsonl").open(
            "w", encoding="utf-8", buffering=1
        )
        self.add("started", at=time.monotonic() - age_s, pid=process.pid)

    def add(self, kind: str, *, at: float | None = None, **about: Any) -> None:
        """Write one line."""
        line = {"kind": kind, "at": time.monotonic() if at is None else at, **about}
        self._file.write(json.dumps(line) + "\n")


class Model(nn.Module):
    """A small causal transformer: 6.4 million parameters, 25 MB in float32."""

    def __init__(self) -> None:
        """Build it from torch's own layers."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, time, vocabulary)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        body: Tensor = self.body(self.embedding(tokens), mask=mask, is_causal=True)
        return torch.as_tensor(self.head(body))


def load_lazy_parts() -> None:
    """Let torch load what it loads only at the first optimizer step: those are imports, too."""
    one = nn.Parameter(torch.zeros(1))
    one.sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW([one]).step()


def make_model(seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """Return the model and its inner optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), INNER_LR)


def digest(model: nn.Module) -> str:
    """Return a hash of all parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    notes: Notes,
    step_s: float,
    committed: Callable[[], int],
    members: Callable[[], int],
    stopping: Callable[[], bool],
    seed: int,
) -> None:
    """Train until asked to stop; note every step, and the parameters after every round.

    Args:
        model: What is trained.
        optimizer: One whose `step` also agrees with the others when it is time.
        notes: Where things are noted.
        step_s: Length to which a step is stretched.
        committed: Tells how many rounds are committed, as this process knows.
        members: Tells how many took part in the last round.
        stopping: Tells whether to leave.
        seed: Of this process's data.
    """
    source = torch.Generator().manual_seed(seed)
    steps, known = 0, committed()
    while not stopping():
        began = time.monotonic()
        tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=source)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        before = time.monotonic()
        optimizer.step()
        ended, steps, round_ = time.monotonic(), steps + 1, committed()
        about: dict[str, Any] = {"step": steps, "round": round_, "seconds": ended - before}
        if round_ != known:
            about |= {"digest": digest(model), "members": members()}
            known = round_
        notes.add("step", at=ended, **about)
        if "digest" not in about:  # the length of a round is what is measured
            time.sleep(max(0.0, step_s - (time.monotonic() - began)))
