"""Arithmetic on the flat parameter vector: read, write, cut, mask, reproducible sums.

May import torch, task, codec, group, devices and the leaves. Start at `flat.py`.
"""
