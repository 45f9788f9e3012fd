"""Which examples a job is fine-tuned on, and how they become rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleOptions:
    """Which examples, and how they become rows; the keys of `[tune]` of the same names."""

    data: Sequence[str]
    weights: Sequence[float] = ()
    context: int
    seed: int
    held_out: float = 0.05
    template: str = ""
    completion_only: bool = True
    pack: bool = True
    keep: Sequence[str] = ()
    deduplicate: bool = True
    near_duplicates: float = 0.0
    min_answer_tokens: int = 1
    objective: str = "answers"

    @property
    def pairs(self) -> bool:
        """Whether an example is two answers."""
        return self.objective in ("dpo", "kto")

    @property
    def judged(self) -> bool:
        """Whether answers have labels; the second answer of a row is then to another prompt."""
        return self.objective == "kto"
