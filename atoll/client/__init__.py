"""`atoll.connect`: queues and topics for any program, without a job.

May import the leaves, config, net, queues and node (to trust a hub). No torch.
Start with `program.py`.
"""

from atoll.client.program import Client, connect

__all__ = ["Client", "connect"]
