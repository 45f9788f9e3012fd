"""A self-repairing connection to the hub, and HTTP calls to it.

May import errors, ids, clock, config and wire, and never torch. Start reading at `link.py`, then
`connection.py`; `sync_link.py` is the interface for threads.
"""
