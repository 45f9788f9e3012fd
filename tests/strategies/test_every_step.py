from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.strategies.outer.every_step import EveryStep
from tests.contracts.strategy_suite import (
    StrategySuite,
    adamw,
    batches,
    small_model,
    squared_error,
)


class TestEveryStep(StrategySuite):
    name = "every_step"
    options = EveryStep()

    def reference(self, members: int, steps: int) -> Tensor:
        """One model on the members' batches put together."""
        model = small_model()
        optimizer, streams = adamw(model), [batches(slot) for slot in range(members)]
        for _ in range(steps):
            parts = [next(stream) for stream in streams]
            whole = tuple(torch.cat(side) for side in zip(*parts, strict=True))
            optimizer.zero_grad()
            squared_error(model, (whole[0], whole[1]))[0].backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return torch.cat([p.detach().double().flatten() for p in model.parameters()])
