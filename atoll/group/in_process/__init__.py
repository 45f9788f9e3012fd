"""Members on threads of one process: the round machine behind a lock, for tests and experiments.

May import what `atoll/group` may; the rest of `atoll/group` imports only `servers.py` of it.
Start reading at `groups.py` (how it is used), then `coordinator.py`.
"""
