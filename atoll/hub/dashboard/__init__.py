"""Hub, dashboard: the dashboard: pages, snapshots and server-sent events.

It may import all sub-rooms.
Start reading at `snapshot.py`, then `sse.py`.
"""
