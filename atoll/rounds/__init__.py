"""The round machine: members, attempts and verdicts, without sockets, files or a clock.

May import errors, ids and wire only: the hub and the in-process group both run on it.
Start reading at `machine.py`, then `quorum.py` (plans) and `checks.py` (verdicts).
"""
