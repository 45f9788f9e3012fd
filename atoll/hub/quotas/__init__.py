"""Hub, quotas: how much of the hub each token, node and job may use, and who uses how much.

It may import hub/db.
Start reading at `limits.py` (the kinds), then `ledger.py`.
"""
