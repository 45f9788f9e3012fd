"""Sessions: WebSocket connections of nodes and members, control messages, and the relay.

It may import hub/db, jobs, security, observability, storage, rounds, nodes, scheduler and queues.
Start reading at `session.py`, then `router.py` and `relay.py`.
"""
