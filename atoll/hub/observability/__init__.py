"""Hub, observability: metrics, logs and events of jobs, and the history of the hub itself.

It may import hub/db and quotas.
Start reading at `metrics.py`.
"""
