"""The hub's SQLite file: one writer thread that groups writes into commits.

May import: the leaves and wire.
Start in database.py; hub/stores.py opens all that a hub has on disk.
"""
