"""Arithmetic on the flat parameter vector: read, write, cut, mask, reproducible sums.

Imports torch, task and the leaves. Start at `flat.py`.
"""
