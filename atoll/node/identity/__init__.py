"""Node, identity: how a machine joins a hub, and proves who it is.

It may import errors, ids, net and wire.
Start reading at `join.py`.
"""
