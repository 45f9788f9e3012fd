"""Hub, sessions: WebSocket connections of nodes and members, their send queues, and the relay.

It may import hub/db, observability, security, jobs and rounds.
Start reading at `session.py`, then `relay.py`.
"""
