"""The rank of this process in its island, in torchrun's environment variables."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

SUPERVISED = "ATOLL_SUPERVISED"
"""Set for ranks started by a member's own process. RANK alone is ambiguous: it may belong to a
batch system in which the node agent runs.
"""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The position of one process in its island."""

    rank: int
    ranks: int
    local_rank: int
    """Number on its machine, which is also that of its accelerator."""
    address: str
    """Host of rank 0."""
    port: int
    local_ranks: int = 0
    """Ranks on this machine; 0: all."""
    machine: int = 0
    """Index among the island's machines."""
    machines: int = 1

    @property
    def dial(self) -> str:
        """Address of rank 0, host:port, with an IPv6 host in brackets."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `rank_place` reads."""
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


def split_ranks(ranks: int, *, machines: int) -> list[range]:
    """Return the ranks of each machine: consecutive, as even as possible."""
    each, more = divmod(ranks, machines)
    ends = [each * n + min(n, more) for n in range(machines + 1)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def rank_place(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Return the rank, or None for a single process; raises ConfigError for bad variables."""
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
            "the rank environment of this process is incomplete",
            given=f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error),
            expected=", ".join(NAMES),
            remedy="start it with `atoll run`, or with torchrun",
        ) from error


def supervised_place(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Return the rank if a member's own process started it, else None; raises like `rank_place`."""
    return rank_place(environment) if environment.get(SUPERVISED) else None


def rank_environment(
    place: RankPlace,
    *,
    defaults: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
    **more: str,
) -> dict[str, str]:
    """Return `environment` with the rank's place and `more`; `defaults` have lowest priority."""
    return {**defaults, **environment, **place.variables(), SUPERVISED: "1", **more}
