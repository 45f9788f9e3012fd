"""Members on threads of one process, on the round machine, for tests and experiments.

May import what `atoll/group` may; the rest of `atoll/group` imports only `servers.py` of it.
Start reading at `groups.py` (its interface), then `coordinator.py`.
"""
