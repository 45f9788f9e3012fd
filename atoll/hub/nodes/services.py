"""The services of a hub that act on jobs, as one argument."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.clock import Clock
from atoll.hub.nodes.membership import Membership
from atoll.hub.paths.service import PathService
from atoll.hub.rounds.checkpoints import Checkpoints
from atoll.hub.rounds.service import RoundService
from atoll.hub.sessions.session import Sessions
from atoll.hub.stores import Stores
from atoll.hub.swarm.service import SwarmService
from atoll.hub.verification.service import VerificationService


@dataclass(frozen=True, slots=True, kw_only=True)
class JobServices:
    """What scheduler, router, views and alarms share."""

    stores: Stores
    sessions: Sessions
    membership: Membership
    rounds: RoundService
    checkpoints: Checkpoints
    swarm: SwarmService
    paths: PathService
    verification: VerificationService
    clock: Clock
