"""The round machine: who takes part in a round, and what was decided; no sockets, files or clock.

May import errors, ids and wire only: the hub and the in-process group both run on it.
Start reading at `machine.py`, then `quorum.py` (a plan) and `checks.py` (a verdict).
"""
