"""Which rank of an island this process is; the variables are those of torchrun."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

KEPT = "ATOLL_KEPT"
"""Set for ranks that a member's own process started: RANK alone may be anybody's, e.g. a batch
system's in whose job the node agent itself runs."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One process's place in its island."""

    rank: int
    ranks: int
    local_rank: int
    """Its number on its machine, which is also that of its accelerator."""
    address: str
    """Where rank 0 can be dialled."""
    port: int
    local_ranks: int = 0
    """Ranks on this machine; 0: all of them."""
    machine: int = 0
    """Which of the island's machines this is."""
    machines: int = 1

    @property
    def dial(self) -> str:
        """Where rank 0 can be dialled, host:port; the colons of an IPv6 address in brackets."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"

    @property
    def leads(self) -> bool:
        """Whether it is the rank that speaks for the island."""
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """Return the variables by which a process is told its place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_ranks or self.ranks),
            "GROUP_RANK": str(self.machine),
            "GROUP_WORLD_SIZE": str(self.machines),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def dealt(ranks: int, *, machines: int) -> list[range]:
    """Return which ranks each machine of an island has: runs, as even as possible."""
    each, more = divmod(ranks, machines)
    ends = [each * n + min(n, more) for n in range(machines + 1)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def rank_place(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Return the place that the environment names; None for a process by itself.

    Raises:
        ConfigError: some variables are set and others are missing, or they are no numbers.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    try:
        return RankPlace(
            rank=int(environment["RANK"]),
            ranks=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            local_ranks=int(environment.get("LOCAL_WORLD_SIZE", "0")),
            machine=int(environment.get("GROUP_RANK", "0")),
            machines=int(environment.get("GROUP_WORLD_SIZE", "1")),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "the place of this process in its island is incomplete",
            given=f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error),
            expected=", ".join(NAMES),
            remedy="start it with `atoll run`, or with torchrun",
        ) from error


def kept_place(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Return the place of a rank that a member's own process started; None: it is no such rank.

    Raises:
        ConfigError: as `rank_place`.
    """
    return rank_place(environment) if environment.get(KEPT) else None


def rank_environment(
    place: RankPlace,
    *,
    defaults: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
    **more: str,
) -> dict[str, str]:
    """Return the whole environment of a rank: this process's own, and its place.

    Args:
        place: Which rank.
        defaults: Variables that it gets unless the environment has them.
        environment: What is added to.
        more: Further variables.
    """
    return {**defaults, **environment, **place.variables(), KEPT: "1", **more}
