"""Gossip: every member averages with its neighbours in a graph only.

D-PSGD (Lian et al. 2017, https://arxiv.org/abs/1705.09056), and with `push_sum` stochastic gradient
push (Assran et al. 2019, https://arxiv.org/abs/1811.10792). Legend: x_i the parameters of member i
before its step, u_i what its optimizer adds (-gamma g_i for SGD), W the weights of the graph
(`graphs`), w_i the mass of member i, X_i = w_i x_i.

    plain:     x_i = sum_j W_ij x_j + u_i
    push-sum:  X_i = sum_j A_ij X_j + u_i ;  w_i = sum_j A_ij w_j ;  x_i = X_i / w_i

As in the paper, the gradient is taken at x_i before the mixing: the round after a step exchanges
the parameters from before that step and adds the member's own update on top. This works with every
inner optimizer. With `every` above 1 the steps between two rounds are local, and u_i is the last
one.

A codec encodes the parameters: x^_j is what all members decode, the sender included, and x_i +
sum_j W_ij (x^_j - x^_i) keeps the mean whatever the codec loses. `feedback(...)` adds a round's
loss to the next one.

If a member is lost, its weight goes to the members that would have received its values (plain), or
to those that would have sent to it (push-sum): rows still add up to 1, and no mass is lost.

Differs from the papers:
  * all members agree on a round, though each exchanges with its neighbours only: a round that
    cannot be finished is repeated by all;
  * floating-point buffers are mixed like parameters;
  * at the end every member gets the mean of all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.errors import ConfigError, unknown
from atoll.group.run_round import Exchange
from atoll.methods.decentralized import Gossip
from atoll.strategies.base import SyncResult, Traffic
from atoll.strategies.graphs import GRAPHS, UNEVEN, mixing, neighbours, pushing
from atoll.strategies.outer.decentralized import DecentralizedOuter
from atoll.strategies.rounds.all_to_all import AllToAllVectors
from atoll.strategies.traffic import all_to_all_volume
from atoll.strategies.vectors.flat import length
from atoll.task import Task
from atoll.wire.messages import RoundPlan

KEY = "parameters"
"""Key of the codec's residual."""

MASS = "own.mass"


@dataclass(frozen=True, slots=True)
class GossipState:
    """The result of a round of gossip for one member."""

    vector: Tensor
    """Its mixed values, without its own last step."""
    mass: float
    alone: bool
    """Nothing was exchanged: the values are exactly its own."""
    contributors: tuple[str, ...]
    weight: float
    digest: str


class GossipOuter(DecentralizedOuter):
    """See the module's docstring."""

    def __init__(self, options: Gossip, *, clock: Clock | None = None) -> None:
        """Check the options."""
        super().__init__(every=options.every, clock=clock)
        if options.graph not in GRAPHS:
            raise unknown("graph", options.graph, GRAPHS)
        if options.graph in UNEVEN and not options.push_sum:
            raise ConfigError(
                "in this graph members receive different total weights, which biases their mean",
                given=f"graph {options.graph}", expected="push_sum = true",
                remedy='switch push_sum on, or take graph = "one-peer"',
            )  # fmt: skip
        self.options = options
        self._mass = 1.0

    @property
    def _own_weight(self) -> float:
        return self._mass

    def _stand(self, task: Task) -> None:
        self._before = self._flat.read()
        self._mass = 1.0

    def _weights(self, n: int, round_: int) -> Tensor:
        graph = pushing if self.options.push_sum else mixing
        return graph(self.options.graph, n, round_=round_)

    def gradients(self, task: Task) -> None:
        """Keep the parameters from before the step: these are sent to the neighbours."""
        self._flat.read(self._before)

    def _round(self, task: Task) -> SyncResult:
        entered = self._clock.monotonic()
        update = self._flat.read(self._scratch).sub_(self._before)
        norm = self._check(update, task)
        self._check(self._before, task)
        number, prepare_s = task.round, self._clock.monotonic() - entered
        try:
            agreed = self._round_client.run(task, self._exchange(task), base=self._base, norm=norm)
        except BaseException:
            self._all_to_all.finish(committed=False)
            raise
        began = self._clock.monotonic()
        mixed = agreed.reduced
        self._all_to_all.finish(committed=self._group.me in mixed.contributors)
        moved = 0.0
        if not mixed.alone:
            new = mixed.vector.add_(update).div_(mixed.mass)
            moved = length(new - self._before)
            self._flat.write(new)
        self._mass = mixed.mass
        self._advance(task, mixed.digest)
        apply_s = self._clock.monotonic() - began
        self._round_client.note_applied(apply_s)
        return SyncResult(
            round=number, contributors=mixed.contributors, weight=mixed.weight,
            seconds={**agreed.seconds, "prepare": prepare_s, "apply": apply_s},
            sent_bytes=agreed.sent_bytes, received_bytes=agreed.received_bytes, delta_norm=moved,
            digest=self._base, aborted=agreed.attempts - 1,
        )  # fmt: skip

    def _exchange(self, task: Task) -> Exchange[GossipState]:
        """Return the exchange with this member's neighbours, which mixes in their values."""
        values = self._before if self._mass == 1.0 else self._before * self._mass

        def exchange(plan: RoundPlan) -> GossipState:
            members = plan.members
            me, weights = members.index(self._group.me), self._weights(len(members), plan.round)
            receivers = [
                member for k, member in enumerate(members) if k != me and weights[k, me] > 0
            ]
            got = self._all_to_all.exchange(
                plan,
                {KEY: values},
                to=receivers,
                weight=self._mass,
                resting=task.state_lock.resting,
            )
            return self._mix(got, values, weights, members)

        return exchange

    def _mix(
        self, got: AllToAllVectors, values: Tensor, weights: Tensor, members: list[str]
    ) -> GossipState:
        """Return the member's values mixed with those received from its neighbours."""
        me, own = members.index(self._group.me), got.own[KEY]
        row, column = weights[me].tolist(), weights[:, me].tolist()
        coming = {m: row[members.index(m)] for m in got.others}
        if self.options.push_sum:
            given = sum(column[k] for k, m in enumerate(members) if k != me and m in got.weights)
        else:
            given = sum(coming.values())
        facts = tuple(got.weights), sum(got.weights.values()), got.digest
        if len(members) == 1 or (not coming and not given and self._mass == 1.0):
            return GossipState(values, 1.0, True, *facts)
        vector = torch.sub(values, own).add_(own, alpha=1.0 - given)
        mass = (1.0 - given) * self._mass
        for member, weight in coming.items():
            vector.add_(got.others[member][KEY], alpha=weight)
            mass += weight * got.weights[member]
        return GossipState(vector, mass if self.options.push_sum else 1.0, False, *facts)

    # ----------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the decentralized state and this member's mass."""
        return super().state_dict() | {MASS: torch.tensor(self._mass, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state; a member that copies a donor starts with mass 1."""
        super().load_state_dict(state)
        self._mass = float(state[MASS]) if MASS in state else 1.0

    def _round_volume(self, elements: int, peers: int, *, round_: int, rank: int) -> Traffic:
        nbytes = self._codec.nbytes(elements)
        found = neighbours(self.options.graph, peers, round_=round_)
        receivers = sum(rank in senders for senders in found)
        return all_to_all_volume(
            [(nbytes, receivers)] if receivers else [], [nbytes] * len(found[rank])
        )
