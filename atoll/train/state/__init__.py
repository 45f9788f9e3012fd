"""Saving a member, restoring it, and taking over the committed state from a donor.

May import checkpoint, recovery, strategies and group.
Start with `committed.py`, then `recovery_client.py`.
"""
