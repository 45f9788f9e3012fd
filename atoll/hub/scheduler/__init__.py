"""Placement: which node runs which process of which job, from request to launch command.

May import wire and, of the hub, jobs, nodes, rounds, sessions, observability, storage and db.
Start in `scheduler.py`, then `requests.py` (what jobs lack) and `assign.py` (bin packing).
"""
