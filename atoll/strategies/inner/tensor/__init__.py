"""Layers split over ranks: heads, features, vocabulary and sequence.

May import the inner room; nothing outside of it imports this but parallelize.py.
Start with plans.py (which layer is split how), then tensor.py (how that is done).
"""
