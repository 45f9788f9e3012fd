"""A member's share of a script's own data: order, position, and the data of lost members.

May import data and torch.
Start with `share.py`, then `sources.py`.
"""
