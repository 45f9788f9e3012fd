"""Recovery: a member without the committed state fetches it from donors, which keep training.

It may import the leaves, wire, net and checkpoint.
Start reading at `recover.py` (the receiver) and `server.py` (the donor).
"""

from atoll.recovery.fetch import Recipient
from atoll.recovery.recover import Recovered, recover
from atoll.recovery.server import StateServer
from atoll.recovery.snapshot_cache import StateOf

__all__ = ["Recipient", "Recovered", "StateOf", "StateServer", "recover"]
