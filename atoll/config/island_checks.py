"""What `[island]` cannot mean, refused before anything starts."""

from __future__ import annotations

from atoll.config.tables import JobSpec
from atoll.errors import ConfigError


def check_island(spec: JobSpec) -> None:
    """Refuse islands that nothing here can start.

    Raises:
        ConfigError: the mesh contradicts itself, it goes over several machines, or the program is
            none that several processes run together.
    """
    ranks = spec.mesh.ranks  # raises where its numbers do not go together
    if spec.island.machines > 1:
        raise ConfigError(
            "the ranks of an island are started on one machine",
            given=f"machines = {spec.island.machines} in [island]",
            expected="machines = 1",
            remedy="one island per machine, nodes = 2 in [job], which any outer strategy keeps "
            "together; or a script of your own under torchrun on the machines",
        )
    if ranks > 1 and (spec.rl.active or spec.job.command):
        what = "policies learn" if spec.rl.active else "a command runs"
        raise ConfigError(
            f"{what} in one process per member",
            given=f"an island of {ranks} ranks ({spec.mesh})",
            expected="the built-in trainer, or a script in [job]",
            remedy="leave out [island] and inner in [strategy]",
        )
