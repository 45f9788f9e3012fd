"""Routes of an exchange: over the relay, direct, or hierarchical.

May import group and collectives. Start reading at `routes.py`.
"""
