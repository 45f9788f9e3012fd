"""A connection to the hub that reconnects by itself, HTTP calls to it, and listening sockets.

May import the leaves, config and wire, and never torch. Start reading at `link.py`, then
`connection.py`; `sync_link.py` is the interface for threads.
"""
