"""The rounds in which the members of a stage agree on their mean gradient, over the hub's group."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import GroupError
from atoll.group.base import Group
from atoll.group.period import PeriodReport
from atoll.group.run_round import mean_exchange, run_round
from atoll.strategies.rounds.round_client import restore_mean
from atoll.train.swarm.parts import Shapes

KEY = "gradient"


class StageRounds:
    """See :class:`~atoll.train.swarm.parts.Rounds`.

    One round at a time, on a thread of its own, which is the only one that uses the group.
    """

    def __init__(self, group: Group, *, codec: str, rows: int) -> None:
        """Encode with `codec`, whose state belongs to a stage; a step has so many `rows`."""
        self._group, self._spec, self._rows = group, codec, rows
        self._thread = ThreadPoolExecutor(1, f"rounds-{group.me}")
        self._codec: tuple[int, Codec] | None = None

    def agree(
        self, stage: int, step: int, closing: int, *, vector: Tensor, rows: int, shapes: Shapes
    ) -> Future[Tensor]:
        """Start a round; its future is the mean with the rows as weights, or an AtollError."""
        if self._codec is None or self._codec[0] != stage:
            codec = make_codec(self._spec)
            codec.set_shapes(shapes)
            self._codec = stage, codec
        return self._thread.submit(self._meet, stage, step, closing, vector, rows, self._codec[1])

    def close(self) -> None:
        """Start no more rounds."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _meet(
        self, stage: int, step: int, closing: int, vector: Tensor, rows: int, codec: Codec
    ) -> Tensor:
        # A member without rows takes part with weight 0: its zeros would shrink the mean.
        exchange = mean_exchange(self._group, [vector], codec=codec, weight=float(rows), key=KEY)
        report = PeriodReport(step, f"stage {stage}", steps=1, closing=closing)
        committed = restore_mean(run_round(self._group, exchange, report), codec=codec, key=KEY)
        found = committed.reduced
        if found.weight != self._rows:
            raise GroupError(
                "the rows of a step were not counted exactly once in the mean of a stage",
                given=f"stage {stage}, step {step}: {found.weight:g} rows",
                expected=f"{self._rows} rows",
            )
        return found.tensors[0]
