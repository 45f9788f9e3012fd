"""The hub's SQLite file: one writer thread that groups writes into commits.

May import: the leaves; stores.py alone also every room of the hub that keeps tables.
Start in database.py, then stores.py (all that a hub has on disk, opened together).
"""
