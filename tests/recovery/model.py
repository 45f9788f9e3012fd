"""A state that members of these tests can have, and hand to one another."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.checkpoint.format.part import Part
from atoll.ids import slot_of

LOCAL = "127.0.0.1"


class Model:
    """A state that members can have: `shared` depends on the round, `inner` on the member too."""

    identical = True

    def __init__(
        self, member: str, *, round_: int = 3, numel: int = 400_000, seed: int = 0
    ) -> None:
        self.member, self.numel, self.seed = member, numel, seed
        self.round = round_
        self.base = f"base-{round_}"
        self.looks = 0
        self._made: dict[int, dict[str, Tensor]] = {}
        self.parts()

    def move_to(self, round_: int) -> None:
        self.round, self.base = round_, f"base-{round_}"

    def parts(self) -> tuple[Part, Part]:
        self.looks += 1
        return self.shared(), self.inner()

    def shared(self) -> Part:
        return Part("shared", self._tensors(self.seed * 1000 + self.round), {"tree": "{}"})

    def inner(self, round_: int = -1) -> Part:
        seed = slot_of(self.member) * 77 + (self.round if round_ < 0 else round_)
        return Part("inner", self._tensors(seed), {"tree": "{}"})

    def _tensors(self, seed: int) -> dict[str, Tensor]:
        if seed not in self._made:
            generator = torch.Generator().manual_seed(seed)
            self._made[seed] = {
                "a": torch.randn(self.numel, generator=generator),
                "b": torch.randn(33, 7, generator=generator, dtype=torch.float64),
            }
        return self._made[seed]
