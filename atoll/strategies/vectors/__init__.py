"""Arithmetic on the flat vector of a model: read, write, cut, mask, exact sums.

Imports torch, task and the leaves.
Start at `flat.py`.
"""
