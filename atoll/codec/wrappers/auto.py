"""auto: choose the most precise codec that is fast enough for the measured link, on all members.

  auto(fp32,bf16,int8)      in order of precision; the default of `auto`
  feedback(auto)            the same and int4, which needs feedback
  auto:int8                 the same as auto, but begins with int8, as the planner writes it

Every member times its own exchanges. At intervals members agree: each reports, for a ladder of
speeds, whether its link reaches that speed, and the mean of these reports (under a robust policy
the median) gives the slowest link's speed. All members then choose the most precise codec with an
exchange of at most 1.5 times the fastest one's duration. Precision is given up only if it saves a
third of the time; on a fast link fp32 wins because rounding costs more than sending.

Before the first agreement, and without any measurement, it is the first codec, or the one named
behind the colon. When lines change while a job runs, the hub may name another one in a verdict; the
next agreement then comes at once.
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
"""The ladder starts at 1 KB/s and grows by sqrt(2) per step, up to 12 GB/s."""
PATIENCE = 1.5
"""Most duration of a more precise codec, as a multiple of the fastest one's."""
EVERY = 50
"""Rounds between two agreements."""
TELLING_BYTES = 1 << 16
"""Smaller packets are not timed: latency dominates."""
FIRST = 10
"""Initial rounds in which members try to agree, until one has measured a link."""
AUTO = "auto"
PLAIN = ("fp32", "bf16", "int8")
"""Default candidates of `auto`."""
FED_BACK = (*PLAIN, "int4")
"""Default candidates of `feedback(auto)`."""
_CHOICE = f"{SHARED}auto.choice"


class Auto(Wrapper):
    """Delegates to one of several plain codecs, in order of precision; see the module's docstring.

    Raises:
        ConfigError: there are fewer than two candidates, or one is wrapped.
    """

    def __init__(self, candidates: Sequence[Codec], *, spec: str, first: str = "") -> None:
        if len(candidates) < 2 or any(codec.base is not codec for codec in candidates):
            raise ConfigError(
                "auto chooses between several plain codecs",
                given=repr(spec),
                expected="at least two, e.g. auto(fp32,bf16,int8)",
                remedy="put the wrapper outside: feedback(auto(fp32,int8,int4))",
            )
        super().__init__(candidates)
        self.spec = spec
        self.choice = self._index(first) if first else 0
        """Index of the codec in use."""
        self.agreed = False
        self._until = FIRST
        """Before this round members try to agree in each, until one has measured a line."""
        self._elements = 0
        self._bytes_per_s: float | None = None

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `auto`, `auto:first` or `auto:first(codec,codec,...)`."""
        first = ":".join(arguments.values)
        if not inner:
            plain = not first or first.partition(":")[0] in PLAIN
            known = [make_codec(spec) for spec in (PLAIN if plain else FED_BACK)]
            return cls(known, spec=AUTO, first=first)
        return cls(inner, spec=f"auto({','.join(codec.spec for codec in inner)})", first=first)

    @property
    def base(self) -> Codec:
        """The codec in use."""
        return self.parts[self.choice]

    # ---------------------------------------------------------------- measuring and choosing

    def due(self, round_: int) -> bool:
        """Return whether members agree in this round, equally on every member."""
        return round_ % EVERY == 0 or (not self.agreed and round_ < self._until)

    def observe(self, nbytes: int, seconds: float) -> None:
        """Record the duration of an exchange over this member's link, in one direction.

        Small exchanges are ignored: they measure latency, not bandwidth.
        """
        if nbytes >= TELLING_BYTES and seconds > 0:
            self._bytes_per_s = nbytes / seconds

    def ladder(self, *, measured: tuple[int, float] | None = None) -> Tensor:
        """Return 1 for every speed that this member's link reaches, shape (STEPS,).

        `measured` are bytes and seconds of an exchange that is not recorded yet. A member without a
        measurement reports all speeds, so that it does not constrain the choice.
        """
        bytes_per_s = self._bytes_per_s
        if measured is not None and measured[0] >= TELLING_BYTES and measured[1] > 0:
            bytes_per_s = measured[0] / measured[1]
        if bytes_per_s is None:
            return torch.ones(STEPS)
        reached = 2 * math.log2(max(bytes_per_s / SLOWEST, 1.0))
        return (torch.arange(STEPS) <= reached).float()

    def agree(self, ladder: Tensor) -> None:
        """Choose a codec from the mean ladder; every member MUST pass the same values."""
        reached = int((ladder > 1 - 1e-6).int().cumprod(0).sum())
        # All speeds reached: no member has a measurement, or sending costs nearly nothing.
        bytes_per_s = SLOWEST * 2 ** ((max(reached, 1) - 1) / 2) if reached < STEPS else math.inf
        self.choice = self.chosen(bytes_per_s)
        self.agreed = self.agreed or reached < STEPS

    def follow(self, spec: str, *, round_: int) -> None:
        """Take the codec that the hub has planned in this round, and agree anew from the next on.

        Raises:
            ConfigError: it is none of these.
        """
        self.choice = self._index(spec)
        self.agreed, self._until = False, round_ + FIRST

    def _index(self, spec: str) -> int:
        """Return the index of a codec; feedback around it is ignored."""
        codec = make_codec(spec)
        wanted = getattr(codec, "inner", codec).spec
        for number, part in enumerate(self.parts):
            if wanted == part.spec:
                return number
        raise ConfigError(
            "auto cannot choose a codec that is none of its own", given=repr(spec),
            expected="one of " + ", ".join(codec.spec for codec in self.parts),
        )  # fmt: skip

    def chosen(self, bytes_per_s: float) -> int:
        """Return the index of the best codec for a link of that speed."""
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
        """Set the shapes, which give the number of elements of a vector."""
        super().set_shapes(shapes)
        self._elements = sum(math.prod(shape) for shape in shapes)

    def of(self, elements: int) -> Codec:
        """Return the codec in use."""
        return self.base

    def decoder(self, packet: Packet) -> Codec:
        """Return the candidate that decodes a packet."""
        for codec in self.parts:
            if codec.spec == packet.codec:
                return codec
        raise wrong_codec(packet, " or ".join(codec.spec for codec in self.parts))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the choice, which is equal on all members, and the inner codecs' states."""
        state = {_CHOICE: torch.tensor([self.choice, int(self.agreed), self._until])}
        for number, codec in enumerate(self.parts):
            state |= {f"{number}.{name}": value for name, value in codec.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state."""
        if _CHOICE in state:
            values = [int(value) for value in state[_CHOICE]]
            if len(values) != 3 or not 0 <= values[0] < len(self.parts):
                raise ConfigError(
                    "this state is of another codec", given=f"choice {values}",
                    expected=f"one of the {len(self.parts)} codecs of {self.spec}",
                )  # fmt: skip
            self.choice, self.agreed, self._until = values[0], bool(values[1]), values[2]
        for number, codec in enumerate(self.parts):
            prefix = f"{number}."
            codec.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )


def auto_inside(codec: Codec) -> Auto | None:
    """Return the `Auto` inside of `codec`, if any."""
    inner = getattr(codec, "inner", None)
    if isinstance(codec, Auto):
        return codec
    return auto_inside(inner) if inner is not None else None
