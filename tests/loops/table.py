"""Every loop of the suite, and what is known not to hold for it yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tests.loops import library_loops, plain_loops
from tests.loops.job import Loop
from tests.loops.plain_loops import BATCH, SAMPLES


class Circumstance(StrEnum):
    ALONE = "alone"
    TOGETHER = "together"
    LOST = "lost"
    LOST_SHARE = "lost-share"
    RESUMED = "resumed"
    DIVIDED = "divided"


@dataclass(frozen=True)
class Row:
    """A loop, and what is expected of it."""

    loop: Loop
    batches: int = 1
    """Batches of a step."""
    seeded: bool = False
    """Whether the bare loop has to get its data from a share of everything, for equal orders."""
    even: bool = True
    """Whether all members take as many steps. If not, some samples are left, and a member that ends
    earlier takes no part in the last steps of the others."""
    without: frozenset[Circumstance] = frozenset()
    """Circumstances in which nothing is promised."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """By method, how far it may be from the bare loop; 0: not at all."""
    begins_again: bool = True
    """Whether it begins the pass again when the data are divided anew; a trainer goes on behind as
    many batches as it has taken."""
    keeps: bool = True
    """Whether what it gives to `run.keep` goes on exactly. Its state is taken inside the step, so
    what the loop does with it after the step is lost."""
    averages_gradients: bool = True
    """Whether methods that average gradients admit it."""
    needs: str = ""
    """A library."""
    counted: frozenset[str] = frozenset()
    """Buffers that count what each member has done, which one that comes back begins anew."""

    def steps(self, members: int) -> int:
        return SAMPLES // (BATCH * self.batches * members)


OWN_PLACE = frozenset({Circumstance.LOST, Circumstance.LOST_SHARE, Circumstance.RESUMED})
"""Of a loop whose own loader has its place in the data: a new process begins the pass again."""

NEWCOMERS = frozenset({Circumstance.LOST, Circumstance.LOST_SHARE})
"""Of a loop whose frozen parameters start different: newcomers are refused, which has a test."""

ROWS: dict[str, Row] = {
    "plain": Row(plain_loops.plain),
    "shuffled": Row(plain_loops.shuffled, seeded=True),
    "subset": Row(plain_loops.subset, without=OWN_PLACE),
    "weighted": Row(plain_loops.weighted, seeded=True),
    "streamed": Row(plain_loops.streamed),
    "dealt-stream": Row(plain_loops.dealt_stream),
    "uneven": Row(plain_loops.uneven, even=False),
    "frozen": Row(plain_loops.frozen, without=NEWCOMERS),
    "unfrozen": Row(plain_loops.unfrozen, without=NEWCOMERS),
    "beside": Row(plain_loops.beside),
    "tied": Row(plain_loops.tied),
    "sparse": Row(plain_loops.sparse, tolerances={"ddp": 1e-6}),
    "complex": Row(plain_loops.waves),
    "double": Row(plain_loops.double, tolerances={"ddp": 1e-6}),
    "batch-norm": Row(plain_loops.normalised, counted=frozenset({"1.num_batches_tracked"})),
    "accumulated": Row(plain_loops.accumulated, batches=2),
    "averaged": Row(plain_loops.averaged, keeps=False),
    "schedule-by-step": Row(plain_loops.schedule_by_step),
    "one-cycle": Row(plain_loops.one_cycle),
    "half": Row(plain_loops.half),
    "scaled": Row(plain_loops.scaled, keeps=False),
    "compiled": Row(plain_loops.compiled),
    "line-search": Row(plain_loops.line_search, averages_gradients=False),
    "adversarial": Row(plain_loops.adversarial, averages_gradients=False),
    "trainer": Row(library_loops.trainer, seeded=True, needs="transformers", begins_again=False),
    "lightning": Row(library_loops.lightning, needs="lightning", begins_again=False),
    "accelerated": Row(library_loops.accelerated, needs="accelerate"),
}
