"""A model and an environment that pause at every step, for jobs that train until a test ends them.

Without pauses such a job takes all processor time, and the processes that the test starts and waits
for get what is left.

  [model]        name = "tests.paced:gpt", or "tests.paced:calm_gpt" where many members train
  [[rl.policies]] env = "tests.paced:cartpole"
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from torch.nn import Dropout

from atoll.models import GPT, GPTConfig

PAUSE_S = 0.01
"""Several times what a step of a tiny model computes."""


CALM_PAUSE_S = 0.05
"""So long that six members need a quarter of a core."""


class PacedGPT(GPT):
    """A GPT whose forward passes take at least `pause_s` in training, also cut into stages."""

    pause_s = PAUSE_S

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.dropout = _PacedDropout(config.dropout, self.pause_s)


class _PacedDropout(Dropout):
    """What every forward pass comes through once: it pauses."""

    def __init__(self, p: float, pause_s: float) -> None:
        super().__init__(p)
        self.pause_s = pause_s

    def forward(self, x: Tensor) -> Tensor:
        """Return what a dropout does."""
        if self.training:
            time.sleep(self.pause_s)
        return super().forward(x)


def gpt(vocab_size: int, **sizes: Any) -> PacedGPT:
    """Return the model of these keys of `[model]`."""
    return PacedGPT(GPTConfig(vocab_size=vocab_size, **sizes))


class CalmGPT(PacedGPT):
    """The same with longer pauses."""

    pause_s = CALM_PAUSE_S


def calm_gpt(vocab_size: int, **sizes: Any) -> CalmGPT:
    """Return the model of these keys of `[model]`."""
    return CalmGPT(GPTConfig(vocab_size=vocab_size, **sizes))


ENVIRONMENT_PAUSE_S = 0.001
"""Several times what a step of a cart and its policy computes."""


def cartpole(render_mode: str | None = None) -> Any:
    """Return CartPole whose steps take at least `ENVIRONMENT_PAUSE_S`."""
    import gymnasium

    class Paced(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            time.sleep(ENVIRONMENT_PAUSE_S)
            return self.env.step(action)

    return Paced(gymnasium.make("CartPole-v1", render_mode=render_mode))
