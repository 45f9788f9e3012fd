"""Whose rounds are computed again by others, what a difference means, and who is evicted for it.

May import `errors`, `ids` and `wire`: no torch, no sockets, no clock.
Start with `trace.py` (what is compared), then `challenge.py` (one member-round), then `ledger.py`.
"""
