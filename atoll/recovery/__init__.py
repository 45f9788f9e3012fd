"""Live recovery: a member that lacks the committed state takes it from those that have it.

Donors train on; `StateServer` copies their state when somebody asks. `recover` fetches it in
checked chunks from several of them at once, directly where it can, else through the hub.
"""

from atoll.recovery.server import StateServer
from atoll.recovery.shelf import StateOf
from atoll.recovery.takeover import Recovered, recover

__all__ = ["Recovered", "StateOf", "StateServer", "recover"]
