"""Robust aggregation rules, which tolerate contributions that are wrong on purpose.

May import torch, and nothing else of Atoll. Start reading at `order.py` (median, trimmed mean); the
other rules build on `distances.py`.
"""
