"""Strategies, inner tensor: tensor parallelism: a plan per architecture, vocabulary and sequence.

It may import strategies/inner. Start reading at `tensor.py`, then `plans.py`.
"""
