"""What a member measures and reports: metrics, the result, `summary.json`.

May import strategies, data, group and the build of train.
Start with `metrics.py`, then `summary.py`.
"""
