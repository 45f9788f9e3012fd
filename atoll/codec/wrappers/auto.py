"""auto: the codec that pays at the measured speed of the link, the same on every member.

    auto(fp32,bf16,int8)      in order of precision; `auto` alone means these
    feedback(auto)            the same and int4, which needs feedback

Every member measures its link: the bytes and the seconds of its own last exchange. Every so many
rounds members agree: each sends for a ladder of speeds whether its link is that fast, and the mean
of these numbers says what the slowest link can do (the median, where members do not trust each
other). From there the choice is arithmetic that all do alike: the most precise codec whose exchange
takes at most 1.5 times as long as the fastest one's. So precision is given up only where it saves
a third of the time, and on a fast link fp32 wins because rounding costs more than sending.

Before the first agreement, and where nobody could measure anything, it is the first codec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.codec.costs import seconds
from atoll.codec.registry import make_codec
from atoll.codec.spec import Arguments
from atoll.codec.wrappers.wrapper import SHARED, Wrapper, wrong_codec
from atoll.errors import ConfigError

SLOWEST, STEPS = 1e3, 48
"""The ladder begins at 1 KB/s and goes up by the square root of two: to 12 GB/s."""
PATIENCE = 1.5
"""How much longer than the fastest a more precise codec may take."""
EVERY = 50
"""Rounds between two agreements."""
TELLING_BYTES = 1 << 16
"""Packets below this are not measured: how long they take is a matter of delay."""
FIRST = 10
"""In each of so many first rounds members try to agree, until somebody has measured a link."""
PLAIN = ("fp32", "bf16", "int8")
"""What `auto` without brackets chooses from."""
_CHOICE = f"{SHARED}auto.choice"


class Auto(Wrapper):
    """Delegates to one of several codecs; see the module's docstring.

    Args:
        candidates: In order of precision, plain ones.
        spec: Its name.

    Raises:
        ConfigError: there are fewer than two, or one is wrapped.
    """

    def __init__(self, candidates: Sequence[Codec], *, spec: str) -> None:
        if len(candidates) < 2 or any(codec.base is not codec for codec in candidates):
            raise ConfigError(
                "auto chooses between several plain codecs",
                given=repr(spec),
                expected="at least two, e.g. auto(fp32,bf16,int8)",
                remedy="put the wrapper outside: feedback(auto(fp32,int8,int4))",
            )
        super().__init__(candidates)
        self.spec = spec
        self.choice = 0
        """Number of the codec in use."""
        self.agreed = False
        """Whether members have agreed on it."""
        self._elements = 0
        self._bytes_per_s: float | None = None

    @classmethod
    def from_spec(cls, given: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `auto` or `auto(codec,codec,...)`."""
        given.at_most(0)
        if not inner:
            return cls([make_codec(spec) for spec in PLAIN], spec="auto")
        return cls(inner, spec=f"auto({','.join(codec.spec for codec in inner)})")

    @property
    def base(self) -> Codec:
        """The codec in use."""
        return self.parts[self.choice]

    # ---------------------------------------------------------------- measuring and choosing

    def due(self, round_: int) -> bool:
        """Return whether members agree anew in this round; the same on every member."""
        return round_ % EVERY == 0 or (not self.agreed and round_ < FIRST)

    def observe(self, nbytes: int, seconds: float) -> None:
        """Note how long an exchange of so many bytes took over this member's link, one way.

        With few bytes that is the way's delay, not its speed, and says nothing.
        """
        if nbytes >= TELLING_BYTES and seconds > 0:
            self._bytes_per_s = nbytes / seconds

    def ladder(self, *, measured: tuple[int, float] | None = None) -> Tensor:
        """Return 1 for every speed that this member's link reaches, shape (STEPS,).

        Who has measured nothing is in nobody's way.

        Args:
            measured: Bytes and seconds of an exchange that is not noted yet.
        """
        bytes_per_s = self._bytes_per_s
        if measured is not None and measured[0] >= TELLING_BYTES and measured[1] > 0:
            bytes_per_s = measured[0] / measured[1]
        if bytes_per_s is None:
            return torch.ones(STEPS)
        reached = 2 * math.log2(max(bytes_per_s / SLOWEST, 1.0))
        return (torch.arange(STEPS) <= reached).float()

    def agree(self, ladder: Tensor) -> None:
        """Choose by what all members said; every member MUST get the same numbers."""
        reached = int((ladder > 1 - 1e-6).int().cumprod(0).sum())
        # All at the top: nobody has measured anything, or sending costs next to nothing.
        bytes_per_s = SLOWEST * 2 ** ((max(reached, 1) - 1) / 2) if reached < STEPS else math.inf
        self.choice = self.chosen(bytes_per_s)
        self.agreed = self.agreed or reached < STEPS

    def chosen(self, bytes_per_s: float) -> int:
        """Return the number of the codec that pays on a link of that speed."""
        elements = self._elements or 1_000_000
        costs = [
            seconds(
                codec.spec, elements=elements, nbytes=codec.nbytes(elements),
                bytes_per_s=bytes_per_s,
            )
            for codec in self.parts
        ]  # fmt: skip
        return next(i for i, cost in enumerate(costs) if cost <= PATIENCE * min(costs))

    # ------------------------------------------------------------------------ as a codec

    def set_shapes(self, shapes: Sequence[Sequence[int]]) -> None:
        """Learn the shapes, and how many elements a vector has."""
        super().set_shapes(shapes)
        self._elements = sum(math.prod(shape) for shape in shapes)

    def of(self, elements: int) -> Codec:
        """Return the codec in use."""
        return self.base

    def decoder(self, packet: Packet) -> Codec:
        """Return the candidate of a packet."""
        for codec in self.parts:
            if codec.spec == packet.codec:
                return codec
        raise wrong_codec(packet, " or ".join(codec.spec for codec in self.parts))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the choice, which is equal on all members, and the codecs' own states."""
        state = {_CHOICE: torch.tensor([self.choice, int(self.agreed)])}
        for number, codec in enumerate(self.parts):
            state |= {f"{number}.{name}": value for name, value in codec.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state."""
        if _CHOICE in state:
            choice, agreed = (int(value) for value in state[_CHOICE])
            if not 0 <= choice < len(self.parts):
                raise ConfigError(
                    "this state is of another codec", given=f"choice {choice}",
                    expected=f"one of the {len(self.parts)} codecs of {self.spec}",
                )  # fmt: skip
            self.choice, self.agreed = choice, bool(agreed)
        for number, codec in enumerate(self.parts):
            prefix = f"{number}."
            codec.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )


def auto_inside(codec: Codec) -> Auto | None:
    """Return the codec that chooses, where there is one inside of `codec`."""
    inner = getattr(codec, "inner", None)
    if isinstance(codec, Auto):
        return codec
    return auto_inside(inner) if inner is not None else None
