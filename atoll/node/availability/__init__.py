"""The owner's policy: when and how much of the machine may be used.

May import node/processes and launchers. Start reading at `policy.py`, then `watch.py`.
"""
