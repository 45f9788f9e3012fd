"""Net: one self-repairing connection to the hub, and HTTP calls to it.

It may import errors, ids, clock, config and wire, and never torch. Start reading at `link.py`, then
`connection.py`; `sync_link.py` is its form for threads.
"""
