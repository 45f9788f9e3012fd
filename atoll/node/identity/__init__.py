"""How a machine joins a hub and authenticates itself.

May import errors, ids, net and wire. Start reading at `join.py`.
"""
