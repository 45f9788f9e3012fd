"""Live recovery: a member that lacks the committed state takes it from those that have it.

Donors train on; `StateServer` copies their state when somebody asks. `recover` fetches it in
checked chunks from several of them at once, directly where it can, else through the hub.
"""

from atoll.recovery.recover import Recovered, recover
from atoll.recovery.server import StateServer
from atoll.recovery.snapshot_cache import StateOf

__all__ = ["Recovered", "StateOf", "StateServer", "recover"]
