"""Members' rounds that others compute again: who is checked, and what a difference means.

May import `errors`, `digest` and `wire`: no torch, no sockets, no clock.
Start with `trace.py` (what is compared), then `challenge.py` (one member-round), then `ledger.py`.
"""
