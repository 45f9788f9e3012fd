"""Hub, observability: metrics, logs and events of jobs, and the history of the hub itself.

It may import hub/db.
Start reading at `metrics.py`.
"""
