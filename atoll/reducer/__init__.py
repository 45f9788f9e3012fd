"""The reducer: sums members' encoded vectors in fp32 and sends the mean back through the hub.

May import the leaves, config, wire, net, codec and verification.
Start reading at `server.py`, then `combine.py` (the sum, or a robust rule).
"""
