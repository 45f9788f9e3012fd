"""Where checkpoints are kept: a folder, the hub, an object store.

May import checkpoint.format, net.http and wire.
Start with `store.py`, the seam.
"""
